"""How a hit is loaded follows what was measured, and nothing else."""

from __future__ import annotations

import pytest
from rangekv.engine.connector.forecast import (
    DECLINES_IN_A_ROW,
    PREFILL_TOKENS_MIN,
    SAMPLES_MIN,
    Forecast,
    LoadChoice,
)


def measured(*, prefill_s: float, load_s: float, times: int = SAMPLES_MIN) -> Forecast:
    """A forecast that has seen 1,000 tokens computed and 1,000 loaded, each so long."""
    forecast = Forecast("auto")
    for _ in range(times):
        forecast.note((1000, prefill_s), [(1000, load_s)])
    return forecast


@pytest.mark.parametrize("mode", ["layerwise", "async"])
def test_chosen_mode_is_never_second_guessed(mode: str) -> None:
    forecast = Forecast(mode)
    for _ in range(SAMPLES_MIN):
        forecast.note((1000, 0.001), [(1000, 10.0)])
    assert forecast.choose(1000, others_decode=True) is LoadChoice(mode)


def test_nothing_is_declined_before_enough_is_measured() -> None:
    forecast = measured(prefill_s=0.1, load_s=1.0, times=SAMPLES_MIN - 1)
    assert forecast.choose(1000, others_decode=False) is LoadChoice.LAYERWISE
    assert forecast.choose(1000, others_decode=True) is LoadChoice.BACKGROUND


@pytest.mark.parametrize(
    ("load_s", "tokens", "others_decode", "choice"),
    [
        (0.9, 1000, False, LoadChoice.LAYERWISE),
        (0.9, 1000, True, LoadChoice.BACKGROUND),
        (0.9, 16, True, LoadChoice.LAYERWISE),
        (0.02, 1000, True, LoadChoice.LAYERWISE),
        (1.1, 1000, False, LoadChoice.DECLINED),
        (1.1, 1000, True, LoadChoice.DECLINED),
    ],
)
def test_choice_follows_the_prediction(
    load_s: float, tokens: int, others_decode: bool, choice: LoadChoice
) -> None:
    forecast = measured(prefill_s=1.0, load_s=load_s)
    assert forecast.choose(tokens, others_decode=others_decode) is choice


def test_steps_of_few_tokens_say_nothing_about_a_prefill() -> None:
    forecast = measured(prefill_s=1.0, load_s=0.5)
    for _ in range(20):
        forecast.note((PREFILL_TOKENS_MIN - 1, 0.0), [])
    assert forecast.choose(1000, others_decode=False) is LoadChoice.LAYERWISE


def test_one_outlier_decides_nothing() -> None:
    forecast = measured(prefill_s=1.0, load_s=0.5)
    forecast.note((0, 0.0), [(10, 60.0)])
    assert forecast.choose(1000, others_decode=False) is LoadChoice.LAYERWISE


def test_after_many_declines_one_is_loaded_to_measure_anew() -> None:
    forecast = measured(prefill_s=1.0, load_s=2.0)
    choices = [
        forecast.choose(1000, others_decode=False) for _ in range(2 * (DECLINES_IN_A_ROW + 1))
    ]
    assert choices.count(LoadChoice.LAYERWISE) == 2
    assert choices[DECLINES_IN_A_ROW] is LoadChoice.LAYERWISE
