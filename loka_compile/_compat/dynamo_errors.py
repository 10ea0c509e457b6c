"""Exceptions of Dynamo that our code meets. Private: ``torch._dynamo.exc`` (torch 2.11 to 2.14).

``BackendCompilerFailed`` wraps whatever a backend raises (``inner_exception``); ``RestartAnalysis`` passes through a
backend when Dynamo gives the present capture up and makes another one.
"""

from torch._dynamo.exc import BackendCompilerFailed, RestartAnalysis

__all__ = ["BackendCompilerFailed", "RestartAnalysis"]
