"""The forms in which a value can be kept, as plain data. Lives in `remat.core.forms`."""

from remat.core.forms import (
    ENCODINGS,
    Encoding,
    applicable,
    get_encoding,
    is_lossless,
    stored_bytes,
)

__all__ = ["ENCODINGS", "Encoding", "applicable", "get_encoding", "is_lossless", "stored_bytes"]
