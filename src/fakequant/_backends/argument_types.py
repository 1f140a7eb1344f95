"""Names for argument types that are open on purpose. To type checkers they are all `Any`."""

from typing import Any, TypeAlias

# A number, a list, or an array of either library.
Numbers: TypeAlias = Any
# A dtype of either library. They have no common type.
DType: TypeAlias = Any
# An argument before its checks. It may be anything that a user passes.
Unchecked: TypeAlias = Any
