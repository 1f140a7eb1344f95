"""`load_grids` and `audit` of GGUF files: ours, and those of llama-quantize."""

import pytest
import torch
from shared.thoroughness import sampled

import fakequant as fq
from tiny_gguf_models import config_of, float_model, prepared, texts, write_base
from tiny_language_models import assert_same_bits

_CASES = {
    f"{name} {kind}": (name, kind)
    for name, kind in [
        ("llama", "q4_0"), ("llama", "q4_1"), ("llama", "q8_0"), ("llama", "mxfp4"), ("llama", "tq2_0"),
        ("qwen3", "q4_0"), ("mixtral", "q4_0"), ("qwen3_moe", "q4_1"), ("gemma2", "q4_0"), ("bert", "q8_0"),
    ]
}  # fmt: skip
# The numbers of llama-quantize's types.
_FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7}


def _logits(model):
    with torch.no_grad():
        return next(iter(model(**texts()).values()))


def _sizes(kind):
    return {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if kind == "tq2_0" else {}


@pytest.mark.parametrize("case", sampled(_CASES, "llama q4_0", "llama q4_1", "mixtral q4_0", "gemma2 q4_0"))
def test_training_continues_on_the_grids_of_a_file(case, tmp_path):
    name, kind = _CASES[case]
    model = prepared(name, kind)
    fq.export_gguf(model, tmp_path / "model.gguf")
    assert fq.audit(model, tmp_path / "model.gguf").ok
    again = fq.load_grids(float_model(name, **_sizes(kind)), tmp_path / "model.gguf").eval()
    assert_same_bits(_logits(again), _logits(model))
    fq.export_gguf(again, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


@pytest.mark.parametrize("kind", _FILE_TYPES)
def test_files_of_llama_quantize(kind, tmp_path):
    """The same codes as ours without training. Its output layer has another type, which stays in float."""
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    base = write_base(float_model(hidden_size=256, head_dim=64), tmp_path / "base.gguf")
    how = llama_cpp.LlamaModelQuantizeParams()
    how.ftype, how.nthread = _FILE_TYPES[kind], 1
    llama_cpp.disable_logging()
    llama_cpp.model_quantize(str(base), str(tmp_path / "theirs.gguf"), how)
    model = fq.prepare(float_model(hidden_size=256, head_dim=64), config_of("llama", kind))
    found = {layer.path: layer for layer in fq.audit(model, tmp_path / "theirs.gguf").layers}
    equal = [path for path, layer in found.items() if layer.is_equal]
    assert {path for path in found if ".layers." in path} <= set(equal)
    if kind == "q8_0":
        again = fq.load_grids(float_model(hidden_size=256, head_dim=64), tmp_path / "theirs.gguf")
        assert len(equal) == len(found)
    else:
        assert found["lm_head"].stored == "Q6_K"
        with pytest.warns(UserWarning, match=r"lm_head\.weight is Q6_K in .*, for which fakequant has no grid"):
            again = fq.load_grids(float_model(hidden_size=256, head_dim=64), tmp_path / "theirs.gguf")
    layer = again.model.layers[0].self_attn.q_proj
    assert layer.weight_quantizer.spec.ggml_type == kind
    assert layer.input_quantizer.spec.ggml_type == "q8_0_input"


def test_an_audit_counts_what_a_converter_has_moved(tmp_path):
    """Weights on another 4-bit grid, converted by the rule of Q4_0."""
    other = fq.prepare(float_model(), fq.recipes.int4_weight_only(32, target="compressed-tensors"))
    trained = {path: layer for path, layer in other.named_modules() if hasattr(layer, "weight_quantizer")}
    model = float_model()
    with torch.no_grad():
        for path, layer in trained.items():
            model.get_submodule(path).weight.copy_(layer.weight_quantizer(layer.weight))
    fq.export_gguf(fq.prepare(model, fq.recipes.gguf("q4_0").skip("*embed_tokens")), tmp_path / "model.gguf")
    found = fq.audit(other, tmp_path / "model.gguf")
    assert not found.ok
    moved = [layer.moved / layer.elements for layer in found.layers if ".layers." in layer.path]
    assert min(moved) > 0.1


def test_files_of_other_models_are_refused(tmp_path):
    fq.export_gguf(prepared("llama", "q4_0"), tmp_path / "model.gguf")
    for other, message in (
        (float_model("qwen3"), r"is for the architecture 'llama', and the model is 'qwen3'"),
        (float_model(num_hidden_layers=1), r"block_count is 2 in .*, and 1 in the model"),
        (float_model(intermediate_size=64), r"blk\.0\.ffn_gate\.weight in .* has the shape"),
    ):
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            fq.load_grids(other, tmp_path / "model.gguf")
        assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    with pytest.raises(TypeError, match="transformers"):
        fq.load_grids(torch.nn.Linear(2, 2), tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "part.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        fq.load_grids(float_model(), tmp_path / "part.gguf")
