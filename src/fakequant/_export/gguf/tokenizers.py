"""The vocabulary of a file, from a fast tokenizer of transformers.

llama.cpp has its own tokenizers, and a file says which one: byte-level BPE, with the name of the rule that splits texts
into words; BPE with byte fallback, which it calls SPM; or WordPiece.
"""

import json
from typing import Any

from fakequant._export.gguf.file import Metadata, field

# The rules that split texts into words, by their regular expression, as llama.cpp names them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RULES = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
# WordPiece has other names for the first and the last token of a text.
_WORD_PIECE = {"bos": "cls", "eos": "sep"}
_SPACE = "\u2581"


def tokenizer_metadata(tokenizer: Any, config: Any) -> Metadata:
    """Returns the metadata of a tokenizer. None for a file without a vocabulary.

    Raises ValueError if llama.cpp has no such tokenizer.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": field("none")}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"`tokenizer` must be a fast tokenizer of transformers, got {type(tokenizer).__name__}.\n"
            "Use AutoTokenizer.from_pretrained, or a `base` file, which has a vocabulary."
        )
    described = json.loads(backend.to_str())
    model, rule, spelled = _kind_of(described)
    size = config.vocab_size
    ids = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(ids) >= size:
        raise ValueError(f"The tokenizer has {max(ids) + 1} tokens, and the model has {size}.")
    added = {token["id"]: token for token in described["added_tokens"]}
    tokens, types = [], []
    for number in range(size):
        token, kind = ids.get(number, f"[PAD{number}]"), _NORMAL
        if number not in ids:
            kind = _UNUSED
        elif number in added:
            kind = _CONTROL if added[number]["special"] else _USER
        elif model == "llama" and len(token) == 6 and token.startswith("<0x"):
            kind = _BYTE
        if model == "llama" and token == tokenizer.unk_token:
            kind = _UNKNOWN
        if spelled and kind == _NORMAL:
            token = token[2:] if token.startswith("##") else _SPACE + token
        tokens.append(token)
        types.append(kind)
    found = {
        "tokenizer.ggml.model": field(model),
        "tokenizer.ggml.pre": field(rule),
        "tokenizer.ggml.tokens": field(tokens),
        "tokenizer.ggml.token_type": field(types),
    }
    if model == "llama":  # the pair with the largest score is merged first
        found["tokenizer.ggml.scores"] = field([float(-number) for number in range(size)])
        found["tokenizer.ggml.add_space_prefix"] = field(_adds_space(described))
    if model == "gpt2":
        merges = described["model"]["merges"]
        found["tokenizer.ggml.merges"] = field([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    for name, there in _SPECIAL.items():
        name = _WORD_PIECE.get(name, name) if model == "bert" else name
        special = getattr(tokenizer, f"{name}_token_id", None)
        if special is not None:
            found[f"tokenizer.ggml.{there}_token_id"] = field(int(special))
    return {**found, **_edges(tokenizer, model), **_template(tokenizer)}


def _kind_of(described: dict[str, Any]) -> tuple[str, str, bool]:
    """Returns the tokenizer and the rule as llama.cpp names them, and whether words are spelled with ##."""
    model, before = described["model"], described.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    if model["type"] == "WordPiece" and model.get("continuing_subword_prefix") == "##":
        return "bert", "default", True
    if model["type"] == "BPE" and model.get("byte_fallback"):
        return "llama", "default", False
    if model["type"] == "BPE" and any(step.get("type") == "ByteLevel" for step in steps):
        patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
        if not patterns:
            return "gpt2", "gpt-2", False
        if len(patterns) == 1 and patterns[0] in _RULES:
            return "gpt2", _RULES[patterns[0]], False
    raise ValueError(
        f"export_gguf does not know this tokenizer ({model['type']}, split by {before.get('type')}) in llama.cpp.\n"
        "Pass a float file of llama.cpp's converter as `base`, which has its vocabulary, or tokenizer=None."
    )


def _adds_space(described: dict[str, Any]) -> bool:
    normalizer = described.get("normalizer") or {}
    steps = [*normalizer.get("normalizers", [normalizer]), described.get("pre_tokenizer") or {}]
    return any(step.get("prepend") == _SPACE or step.get("prepend_scheme") in ("always", "first") for step in steps)


def _edges(tokenizer: Any, model: str) -> Metadata:
    """Returns whether the tokens of the begin and the end are added to a text."""
    ids = tokenizer("a")["input_ids"]
    first, last = ("cls", "sep") if model == "bert" else ("bos", "eos")
    return {
        "tokenizer.ggml.add_bos_token": field(bool(ids) and ids[0] == getattr(tokenizer, f"{first}_token_id")),
        "tokenizer.ggml.add_eos_token": field(bool(ids) and ids[-1] == getattr(tokenizer, f"{last}_token_id")),
    }


def _template(tokenizer: Any) -> Metadata:
    template = getattr(tokenizer, "chat_template", None)
    return {"tokenizer.chat_template": field(template)} if isinstance(template, str) else {}
