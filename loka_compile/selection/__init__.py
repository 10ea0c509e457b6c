"""From the rows of a table to the kernel of every GEMM (paper section III-C). Pure, no torch import.

``choose`` strings the steps together; ``candidates`` are judged by ``thresholds`` and cost ``operands`` and time;
``combination`` finds the cheapest set, ``batch_cost`` makes it a function of the batch size, ``decision`` is the
answer.
"""
