"""The fault matrix: one module for each owner, one function for each rule, one name for each cell.

Ships with the engine, so that `rangectl replay-fault` and the tests run the same code.
"""
