"""One vLLM process: serves the batches of a scenario file and writes what came out.

Run as `python serve.py SCENARIO.json`; the tests start it fresh for every engine.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main(scenario_path: str) -> None:
    """Serve the steps of a scenario in order; with `killed_by` die while that prompt decodes.

    A step with `patience_s` is served again until each of its prompts has a hit: what is written
    into space that held something else is visible only when the journal of that is on the disk.
    """
    scenario = json.loads(Path(scenario_path).read_text())
    from vllm import LLM, SamplingParams

    llm = LLM(**scenario["llm"])
    results = []
    for step in scenario["steps"]:
        reset = step.get("reset")  # "local": vLLM's own prefix cache; "all": the connector's too
        if reset and not llm.reset_prefix_cache(reset_connector=reset == "all"):
            sys.exit("the reset was not confirmed")
        params = SamplingParams(
            max_tokens=step.get("max_tokens", 4),
            temperature=0,
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=step.get("prompt_logprobs"),
        )
        if "continue" in step:  # the next turn of a chat: what was asked, answered, and more
            asked = scenario["steps"][len(results) - 1]["prompts"][0]
            step["prompts"] = [asked + results[-1][0]["tokens"] + step["continue"]]
        prompts = [
            {"prompt_token_ids": prompt} | step.get("extra", {}) for prompt in step["prompts"]
        ]
        if "abort" in step:
            outputs = _aborted(llm, prompts, params, step["abort"], step["after"])
        elif "preempt" in step:
            outputs = _preempted(llm, prompts, params, step["preempt"])
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            deadline = time.monotonic() + step.get("patience_s", 0)
            while not all(each.num_cached_tokens for each in outputs):
                if time.monotonic() >= deadline:
                    break
                llm.reset_prefix_cache()
                outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([_result(each) for each in outputs])
        Path(scenario["result"]).write_text(json.dumps(results))
    if scenario["killed_by"] is not None:
        params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        llm.llm_engine.add_request("last", {"prompt_token_ids": scenario["killed_by"]}, params)
        while not any(len(each.outputs[0].token_ids) > 2 for each in llm.llm_engine.step()):
            pass
        _kill_all()
    # What the end of the process would do too, but with 5 seconds for the engine core.
    llm.llm_engine.engine_core.shutdown(timeout=60)


def _aborted(
    llm: Any, prompts: list[Any], params: Any, aborted: list[int], after: int
) -> list[Any]:
    """Serve a batch of which some requests are aborted after so many steps of the engine.

    Needs an engine core in this process: only then a call of `step` is one step.
    """
    engine = llm.llm_engine
    names = [f"{id(prompts)}-{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, params)
    finished: dict[str, Any] = {}
    for step in itertools.count(1):
        finished.update({each.request_id: each for each in engine.step() if each.finished})
        if step == after:
            engine.abort_request([names[number] for number in aborted])
        if step >= after and not engine.has_unfinished_requests():
            break
    return [finished[name] for name in names if name in finished]


def _preempted(llm: Any, prompts: list[Any], params: Any, after: int) -> list[Any]:
    """Serve a batch whose requests all lose their blocks once, when each has so many tokens.

    With 0 it is after the first step, which needs an engine core in this process.
    """
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    finished: dict[str, Any] = {}
    is_preempted = False
    while engine.has_unfinished_requests():
        outputs = engine.step()
        answered = [len(each.outputs[0].token_ids) for each in outputs]
        is_time = not after or (len(answered) == len(prompts) and min(answered) >= after)
        if not is_preempted and is_time:
            is_preempted = engine.reset_prefix_cache(reset_running_requests=True)
        finished.update({each.request_id: each for each in outputs if each.finished})
    if not is_preempted:
        sys.exit("nothing was preempted")
    return [finished[str(number)] for number in range(len(prompts))]


def _result(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            round(chosen[token].logprob, 6)
            for token, chosen in zip(completion.token_ids, completion.logprobs, strict=True)
        ],
        "cached": output.num_cached_tokens,
        "finish": completion.finish_reason,
        "prompt_logprobs": [
            round(chosen[token].logprob, 6)
            for token, chosen in zip(
                output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=False
            )
        ],
    }


def _kill_all() -> None:
    """Kill the workers, the engine core and this process, all at once and unannounced.

    This process goes last, so that the locks of the others are gone when it is.
    """
    killed = [(pid, os.pidfd_open(pid)) for pid in _descendants(os.getpid())]
    for pid, _ in killed:
        os.kill(pid, signal.SIGKILL)
    for _, descriptor in killed:
        select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (*_descendants(child), child)]


if __name__ == "__main__":
    main(sys.argv[1])
