"""Running a captured graph on its fake values, as Dynamo does. Private: ``torch._dispatch.python`` (2.11 to 2.14).

Without the Python dispatcher composite operators run in C++ and may ask a symbolic size for its number, which
specialises it: on torch 2.11 a linear layer without bias on 3-D input does.
"""

from torch._dispatch.python import enable_python_dispatcher

__all__ = ["enable_python_dispatcher"]
