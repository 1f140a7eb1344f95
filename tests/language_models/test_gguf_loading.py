"""`load_grids` and `audit` of GGUF files: ours, and those of llama-quantize."""

import numpy as np
import pytest
import torch
from shared.thoroughness import sampled

import fakequant as fq
from fakequant._export.gguf.blocks import unpack
from fakequant._export.gguf.file import GgufFile
from tiny_gguf_models import config_of, float_model, prepared, sizes_of, texts, write_base
from tiny_language_models import assert_same_bits

_CASES = {
    f"{name} {kind}": (name, kind)
    for name, kind in [
        ("llama", "q4_0"), ("llama", "q4_1"), ("llama", "q8_0"), ("llama", "mxfp4"), ("llama", "tq2_0"),
        ("llama", "q4_k"), ("llama", "q6_k"),
        ("qwen3", "q4_0"), ("mixtral", "q4_0"), ("qwen3_moe", "q4_1"), ("gemma2", "q4_0"), ("bert", "q8_0"),
    ]
}  # fmt: skip
# The numbers of llama-quantize's types.
_FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7}
_Q4_K_M, _Q5_K_S = 15, 16


def _logits(model):
    with torch.no_grad():
        return next(iter(model(**texts()).values()))


@pytest.mark.parametrize(
    "case", sampled(_CASES, "llama q4_0", "llama q4_1", "llama q4_k", "mixtral q4_0", "gemma2 q4_0")
)
def test_training_continues_on_the_grids_of_a_file(case, tmp_path):
    name, kind = _CASES[case]
    model = prepared(name, kind)
    fq.export_gguf(model, tmp_path / "model.gguf")
    assert fq.audit(model, tmp_path / "model.gguf").ok
    again = fq.load_grids(float_model(name, **sizes_of(kind)), tmp_path / "model.gguf").eval()
    assert_same_bits(_logits(again), _logits(model))
    fq.export_gguf(again, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def _llama_quantize(model, path, file_type):
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    base = write_base(model, path.with_name("base.gguf"))
    how = llama_cpp.LlamaModelQuantizeParams()
    how.ftype, how.nthread = file_type, 1
    llama_cpp.disable_logging()
    llama_cpp.model_quantize(str(base), str(path), how)


def test_the_scales_of_llama_quantize_are_kept(tmp_path):
    """Q4_K_M: what its search has found stays in training, and the file is written again with the same bytes."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    _llama_quantize(float_model(**sizes), tmp_path / "theirs.gguf", _Q4_K_M)
    theirs = GgufFile(tmp_path / "theirs.gguf").tensors
    assert {tensor.type for tensor in theirs.values()} == {"F32", "Q4_K", "Q6_K"}
    model = fq.load_grids(float_model(**sizes), tmp_path / "theirs.gguf")
    for weights in ("dequantized", "original"):  # whose codes are the nearest ones too
        fq.export_gguf(model, tmp_path / "ours.gguf")
        ours = GgufFile(tmp_path / "ours.gguf").tensors
        for name, tensor in theirs.items():
            assert np.array_equal(ours[name].read(), tensor.read()), (name, weights)
        model.load_state_dict(float_model(**sizes).state_dict(), strict=False)
    batch = texts()
    model.train()(**batch, labels=batch["input_ids"]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    fq.export_gguf(model.eval(), tmp_path / "trained.gguf")
    trained = GgufFile(tmp_path / "trained.gguf").tensors["blk.0.ffn_down.weight"]
    before, after = (unpack(trained.type, tensor.read()) for tensor in (theirs[trained.name], trained))
    assert np.array_equal(before.scale, after.scale)
    assert np.array_equal(before.scales, after.scales)
    assert not np.array_equal(before.codes, after.codes)
    assert fq.verify(model, tmp_path / "trained.gguf", [texts(2)]).ok


def test_other_types_stay_in_float(tmp_path):
    _llama_quantize(float_model(num_hidden_layers=1, **sizes_of("q4_k")), tmp_path / "theirs.gguf", _Q5_K_S)
    with pytest.warns(UserWarning, match=r"weight is Q5_K in .*, for which fakequant has no grid"):
        fq.load_grids(float_model(num_hidden_layers=1, **sizes_of("q4_k")), tmp_path / "theirs.gguf")


@pytest.mark.parametrize("kind", ["q4_0", "tq2_0", "q4_k"])
def test_learned_scales_are_stored_and_continued(kind, tmp_path):
    model = prepared("llama", kind, learned=True, num_hidden_layers=1).train()
    optimizer = torch.optim.SGD(fq.nn.param_groups(model), lr=0.1)
    batch = texts()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    fq.export_gguf(model.eval(), tmp_path / "model.gguf")
    assert fq.verify(model, tmp_path / "model.gguf", [texts(2)]).ok
    layer = model.model.layers[0].mlp.up_proj
    for learned in (True, False):
        again = fq.load_grids(
            float_model("llama", num_hidden_layers=1, **sizes_of(kind)), tmp_path / "model.gguf", learned=learned
        )
        quantizer = again.model.layers[0].mlp.up_proj.weight_quantizer
        assert isinstance(quantizer, fq.nn.LearnedFakeQuantize if learned else fq.nn.FakeQuantize)
        scale = layer.weight_quantizer.scale
        assert_same_bits(quantizer.scale, scale if kind == "q4_k" else scale.half().float())
        assert_same_bits(_logits(again.eval()), _logits(model))


@pytest.mark.parametrize("kind", _FILE_TYPES)
def test_files_of_llama_quantize(kind, tmp_path):
    """The same codes as ours without training. Its output layer has another type."""
    _llama_quantize(float_model(hidden_size=256, head_dim=64), tmp_path / "theirs.gguf", _FILE_TYPES[kind])
    model = fq.prepare(float_model(hidden_size=256, head_dim=64), config_of("llama", kind))
    found = {layer.path: layer for layer in fq.audit(model, tmp_path / "theirs.gguf").layers}
    equal = [path for path, layer in found.items() if layer.is_equal]
    assert {path for path in found if ".layers." in path} <= set(equal)
    assert ("q8_0" if kind == "q8_0" else "q6_k") in found["lm_head"].stored
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
