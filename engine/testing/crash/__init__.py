"""Crash exploration: record what a session does to its files, then look at every power cut of it.

Ships with the engine, so that `rangectl replay-fault crash` and the tests run the same code.
"""
