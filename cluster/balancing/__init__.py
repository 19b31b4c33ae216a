"""Which actor holds which expert, as popularity and membership change: pure functions, no I/O.

plan.py the words; planner.py `balance`; recovery.py `recover`; waves.py `schedule`.
"""
