"""The end of a ``with`` statement."""

from collections.abc import Callable


def close_after_body(close: Callable[[], object], error: BaseException | None) -> None:
    """Close what a ``with`` statement opened; an exception of its body comes first.

    The frames of such an exception often keep buffers, so that closing fails as a consequence.
    """
    try:
        close()
    except Exception as consequence:
        if error is None:
            raise
        error.add_note(f"Afterwards: {consequence}")
