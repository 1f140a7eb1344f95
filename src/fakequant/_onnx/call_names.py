"""Names of the calls of a quantizer. A file keeps them, because it does not compute every call that a model makes."""

import re

_NUMBER = re.compile(r"(.*)#([1-9]\d*)", re.DOTALL)


def call_name(path: str, call: int) -> str:
    """Returns the name of a call: the path of the quantizer, with the number of the call if it is not the first.

    >>> call_name("fc.input_quantizer", 0), call_name("fc.input_quantizer", 1)
    ('fc.input_quantizer', 'fc.input_quantizer#1')
    """
    return f"{path}#{call}" if call else path


def parse_call(name: str) -> tuple[str, int]:
    """Returns the path of a quantizer and the number of the call.

    >>> parse_call("fc.input_quantizer"), parse_call("fc.input_quantizer#1")
    (('fc.input_quantizer', 0), ('fc.input_quantizer', 1))
    """
    match = _NUMBER.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 0)
