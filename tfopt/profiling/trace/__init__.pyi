from .recording import record_trace
from .summary import summarize

__all__ = ["record_trace", "summarize"]
