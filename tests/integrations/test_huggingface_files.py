"""Prepared transformers models are saved to folders and loaded with the same bits."""

import json

import pytest

pytest.importorskip("transformers", reason="tests its folders")
pytest.importorskip("accelerate", reason="needed by the integration")
import torch
import transformers

import fakequant as fq
import tiny_models as tiny
from fakequant.integrations.transformers import from_pretrained, save_pretrained

MODELS = [tiny.bert, tiny.gpt2, tiny.llama, tiny.vit]
every_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def trained(make, config):
    """Returns a prepared model after two training steps, and a batch."""
    transformers.set_seed(0)
    batch = transformers.default_data_collator(tiny.data_for(make)[:8])
    model = fq.prepare(make(), config, batch)
    fq.calibrate(model, [batch], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), batch


def assert_same_when_converted(one, other, batch):
    with torch.no_grad():
        assert torch.equal(one(**batch).logits, other(**batch).logits)
        one, other = fq.convert(one), fq.convert(other)
        tiny.assert_same_everything(one, other)
        if isinstance(one, transformers.ViTForImageClassification):
            return  # ViT reads the weight of a layer, which a converted layer does not have
        assert torch.equal(one(**batch).logits, other(**batch).logits)


@pytest.mark.parametrize("config", [fq.recipes.fp8(), fq.recipes.nvfp4()], ids=["fp8", "nvfp4"])
def test_a_saved_model_in_a_float_format_loads_with_the_same_bits(config, tmp_path):
    model, batch = trained(tiny.bert, config)
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(type(model), tmp_path)
    tiny.assert_same_everything(model, loaded)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, loaded(**batch).logits)


@every_model
@pytest.mark.parametrize("config", [fq.recipes.int8(), fq.recipes.lsq(4)], ids=["int8", "lsq"])
def test_a_saved_model_loads_with_the_same_bits(make, config, tmp_path):
    model, batch = trained(make, config)
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(type(model), tmp_path)
    assert not loaded.training
    tiny.assert_same_everything(model, loaded)
    assert_same_when_converted(model, loaded, batch)


@every_model
def test_a_model_saved_by_transformers_loads_with_a_given_config(make, tmp_path):
    """transformers may save tensors under names of older versions."""
    config = fq.recipes.int8()
    model, _ = trained(make, config)
    model.save_pretrained(tmp_path)
    tiny.assert_same_everything(model, from_pretrained(type(model), tmp_path, quant_config=config))
    with pytest.raises(ValueError, match=r"has no 'fakequant_config'.*\n.*`quant_config`, the QuantConfig"):
        from_pretrained(type(model), tmp_path)


def test_a_loaded_model_saved_by_transformers_keeps_its_config(tmp_path):
    model, _ = trained(tiny.vit, fq.recipes.int8())
    save_pretrained(model, tmp_path / "one")
    loaded = from_pretrained(transformers.ViTForImageClassification, tmp_path / "one")
    loaded.save_pretrained(tmp_path / "two")  # its config contains the QuantConfig
    tiny.assert_same_everything(model, from_pretrained(transformers.ViTForImageClassification, tmp_path / "two"))


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    model, _ = trained(tiny.gpt2, fq.recipes.int8())
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(transformers.GPT2LMHeadModel, tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.lm_head.weight_quantizer is not loaded.transformer.wte.weight_quantizer


def test_auto_classes_load_a_model_from_several_files(tmp_path):
    model, batch = trained(tiny.bert, fq.recipes.lsq(4))
    save_pretrained(model, tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = from_pretrained(transformers.AutoModelForSequenceClassification, tmp_path)
    tiny.assert_same_everything(model, loaded)
    assert_same_when_converted(model, loaded, batch)


def test_float_classes_load_the_weights_of_a_prepared_model(tmp_path):
    model, _ = trained(tiny.bert, fq.recipes.int8())
    save_pretrained(model, tmp_path)
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    weights = dict(model.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in loaded.named_parameters())


def test_a_bfloat16_model_loads_with_the_same_bits(tmp_path):
    model, _ = trained(tiny.bert, fq.recipes.int8())
    model.bfloat16()
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(type(model), tmp_path)
    assert loaded.classifier.weight.dtype == torch.bfloat16
    tiny.assert_same_everything(model, loaded)


def test_loading_a_model_logs_no_unexpected_tensors(tmp_path, caplog):
    model, _ = trained(tiny.bert, fq.recipes.int8())
    save_pretrained(model, tmp_path)
    before = transformers.logging.get_verbosity()
    from_pretrained(type(model), tmp_path)
    assert "UNEXPECTED" not in caplog.text
    assert transformers.logging.get_verbosity() == before


def test_the_quant_config_is_saved_in_config_json(tmp_path):
    config = fq.recipes.int8(target="onnxruntime-x86").skip("classifier")
    model, _ = trained(tiny.bert, config)
    save_pretrained(model, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["fakequant_config"]
    assert fq.QuantConfig.from_dict(saved) == config
    assert not isinstance(from_pretrained(type(model), tmp_path).classifier, fq.nn.QuantizedLayer)


def test_save_pretrained_refuses_a_model_that_is_not_prepared(tmp_path):
    with pytest.raises(ValueError, match=r"not prepared.*\n.*given to fakequant\.prepare"):
        save_pretrained(tiny.bert(), tmp_path)


def test_from_pretrained_refuses_folders_that_do_not_fit(tmp_path):
    config = fq.recipes.int8()
    with pytest.raises(FileNotFoundError, match=r"no folder 'google/bert'.*\n.*snapshot_download"):
        from_pretrained(transformers.BertModel, "google/bert")
    tiny.bert().save_pretrained(tmp_path / "float")
    with pytest.raises(
        ValueError, match=r"lacks \d+ of \d+ tensors of quantizers, such as bert\.\S*quantizer\.\S+\n.*save_pretrained"
    ):
        from_pretrained(transformers.BertForSequenceClassification, tmp_path / "float", quant_config=config)
    model, _ = trained(tiny.bert, config)
    save_pretrained(model, tmp_path / "prepared")
    with pytest.raises(ValueError, match=r"does not hold a BertForMaskedLM .*it lacks .*\.\nPass the class and"):
        from_pretrained(transformers.BertForMaskedLM, tmp_path / "prepared")
    with pytest.raises(ValueError, match=r"does not hold a BertModel .*: .*`bert`"):
        from_pretrained(transformers.BertModel, tmp_path / "prepared")
    with pytest.raises(RuntimeError, match="the state is of a quantizer with the spec"):
        from_pretrained(type(model), tmp_path / "prepared", quant_config=fq.recipes.int8(target="onnxruntime-x86"))
