"""`QATCallback` in `transformers.Trainer`."""

import random

import numpy as np
import pytest

pytest.importorskip("transformers", reason="tests its Trainer")
pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
import torch
import transformers

import fakequant as fq
import tiny_models as tiny
from fakequant.integrations.transformers import QATCallback, from_pretrained
from fakequant.testing.assertions import assert_same_state
from thoroughness import sampled

RESUMED = sampled(
    {
        "bert": (tiny.bert, fq.recipes.int8()),
        "gpt2": (tiny.gpt2, fq.recipes.lsq(4)),
        "vit": (tiny.vit, fq.recipes.int8()),
    },
    "gpt2",
)
SCHEDULE = {"quantize_from": 1, "freeze_ranges_at": 4}
FIGURES = {
    f"quant/{name}_{which}" for name in ("clipped", "levels_used", "scale_drift", "oscillating", "scale", "min", "max")
    for which in ("mean", "worst")
} | {"quant/nonfinite"}  # fmt: skip


class Recorder(transformers.TrainerCallback):
    """Records the logs shown to callbacks, and the model at the start of training."""

    def __init__(self):
        self.logs, self.begun = [], None

    def on_train_begin(self, args, state, control, model=None, **_):
        self.begun = {name: value.clone() for name, value in model.state_dict().items()}

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))


def prepared(make, config=None):
    transformers.set_seed(0)
    return fq.prepare(make(), config or fq.recipes.int8(), transformers.default_data_collator(tiny.data_for(make)[:2]))


def trainer_of(model, folder, *callbacks, data=None, **options):
    options = {"max_steps": 6, "save_strategy": "no", "logging_steps": 2, **options}
    args = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True,
        learning_rate=1e-3, **options,
    )  # fmt: skip
    return transformers.Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


@pytest.mark.parametrize(
    ("make", "config"),
    RESUMED.values(),
    ids=RESUMED,
)
def test_a_resumed_huggingface_training_gives_the_same_bits(make, config, tmp_path):
    def train(resume):
        model, callback = prepared(make, config), QATCallback(**SCHEDULE)
        trainer = trainer_of(
            model, tmp_path, callback, data=tiny.data_for(make), gradient_accumulation_steps=2,
            save_strategy="steps", save_steps=3,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return model, callback

    straight, first = train(None)
    resumed, second = train(str(tmp_path / "checkpoint-3"))
    tiny.assert_same_everything(straight, resumed)
    assert first.schedule.state_dict() == second.schedule.state_dict() == {"steps": 6}
    assert all(quantizer.frozen for _, quantizer in fq.nn.named_quantizers(resumed))
    loaded = from_pretrained(type(straight), tmp_path / "checkpoint-6")
    assert_same_state(saved(straight.eval()), saved(loaded))


def saved(model):
    """Returns what is saved. Whether layers deploy their bias is not; the schedule sets it on resuming."""
    return {name: value for name, value in tiny.everything(model).items() if "deploys" not in name}


def test_huggingface_optimizer_steps_advance_the_schedule_once(tmp_path):
    model, callback, batches = prepared(tiny.bert), QATCallback(**SCHEDULE), []
    model.register_forward_pre_hook(lambda module, _: batches.append(module.training))
    # An epoch has 12 batches, which make two steps of 5 batches and one of 2.
    trainer = trainer_of(model, tmp_path, callback, data=tiny.data_for(tiny.bert), gradient_accumulation_steps=5)
    trainer.train()
    assert sum(batches) == 24
    assert callback.schedule.steps == trainer.state.global_step == 6


def test_huggingface_callback_logs_health_with_the_loss(tmp_path):
    recorder = Recorder()
    trainer = trainer_of(
        prepared(tiny.bert), tmp_path, recorder, data=tiny.data_for(tiny.bert), eval_strategy="steps", eval_steps=3
    )
    QATCallback(**SCHEDULE).add_to(trainer)
    trainer.train()
    last = [logs for logs in recorder.logs if "loss" in logs][-1]
    assert {name for name in last if name.startswith("quant/")} == FIGURES
    assert 0 < last["quant/levels_used_worst"] <= last["quant/levels_used_mean"] <= 1
    assert last["quant/min_worst"] <= last["quant/min_mean"] < 0 < last["quant/max_mean"] <= last["quant/max_worst"]
    assert all(type(value) is float for name, value in last.items() if name.startswith("quant/"))
    history = trainer.state.log_history
    assert [any(name in FIGURES for name in entry) for entry in history] == ["loss" in entry for entry in history]
    assert {name: history[-3][name] for name in FIGURES} == {name: last[name] for name in FIGURES}


def test_huggingface_callback_logs_no_health_if_switched_off(tmp_path):
    recorder = Recorder()
    model, data = prepared(tiny.bert), tiny.data_for(tiny.bert)
    trainer_of(model, tmp_path, QATCallback(log_health=False), recorder, data=data, max_steps=2).train()
    assert [name for logs in recorder.logs for name in logs if name.startswith("quant/")] == []


def test_huggingface_calibration_leaves_batches_and_random_states_unchanged(tmp_path):
    """Batches, dropout and results equal those of a model calibrated beforehand."""

    def train(callback, state=None):
        model, batches, recorder = prepared(tiny.bert), [], Recorder()
        if state is not None:
            model.load_state_dict(state)

        def see(module, args, kwargs):
            if module.training:
                batches.append(kwargs["input_ids"].clone())

        model.register_forward_pre_hook(see, with_kwargs=True)
        trainer_of(model, tmp_path, callback, recorder, data=tiny.data_for(tiny.bert)).train()
        return model, batches, recorder.begun, (torch.get_rng_state(), np.random.get_state()[1], random.getstate())

    one, batches, calibrated, states = train(QATCallback(calibrate=5))
    other, same_batches, _, same_states = train(QATCallback(calibrate=None), calibrated)
    assert len(batches) == len(same_batches) == 6
    assert all(torch.equal(a, b) for a, b in zip(batches, same_batches, strict=True))
    tiny.assert_same_everything(one, other)
    assert torch.equal(states[0], same_states[0])
    assert (states[1] == same_states[1]).all()
    assert states[2] == same_states[2]


def test_huggingface_callback_calibrates_with_the_first_batches_before_evaluation(tmp_path):
    shown = []

    class Watching(QATCallback):
        def calibration_step(self, model, batch):
            shown.append((batch["input_ids"].clone(), model.training, torch.is_grad_enabled()))
            super().calibration_step(model, batch)

    model, trained, modes = prepared(tiny.bert), [], []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: trained.append(kwargs["input_ids"].clone()) if module.training else None,
        with_kwargs=True,
    )

    class Before(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_):
            model.train()
            model.dropout.eval()  # a module in another mode must stay in it
            modes.append([module.training for module in model.modules()])

    class After(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_):
            modes.append([module.training for module in model.modules()])

    trainer = trainer_of(
        model, tmp_path, Before(), Watching(calibrate=3), After(), data=tiny.data_for(tiny.bert), eval_on_start=True,
        eval_strategy="steps", eval_steps=100,
    )  # fmt: skip
    trainer.train()
    assert len(shown) == 3
    assert all(torch.equal(batch, first) for (batch, *_), first in zip(shown, trained[:3], strict=True))
    assert {(training, grad) for _, training, grad in shown} == {(False, False)}
    assert modes[0] == modes[1]
    assert "eval_loss" in trainer.state.log_history[0]


def test_huggingface_callback_keeps_existing_scales(tmp_path):
    model = prepared(tiny.bert, fq.recipes.lsq(8))
    data = tiny.data_for(tiny.bert)
    batch = transformers.default_data_collator(data[:4])
    fq.calibrate(model, [batch], progress=False)
    before, recorder = {name: value.clone() for name, value in model.state_dict().items()}, Recorder()
    trainer_of(model, tmp_path, QATCallback(), recorder, data=data, max_steps=1).train()
    assert [name for name in before if not torch.equal(before[name], recorder.begun[name])] == []


def test_a_second_huggingface_training_restarts_the_schedule(tmp_path):
    model, callback = prepared(tiny.bert), QATCallback(**SCHEDULE)
    trainer = trainer_of(model, tmp_path, callback, data=tiny.data_for(tiny.bert))
    trainer.train()
    assert all(quantizer.frozen for _, quantizer in fq.nn.named_quantizers(model))
    trainer.args.max_steps = 2
    trainer.train()
    assert callback.schedule.steps == 2
    assert not any(quantizer.frozen for _, quantizer in fq.nn.named_quantizers(model))


def test_huggingface_bfloat16_training_keeps_scales_in_float32(tmp_path):
    model, callback = prepared(tiny.bert, fq.recipes.lsq(4)), QATCallback(**SCHEDULE)
    trainer = trainer_of(model, tmp_path, callback, data=tiny.data_for(tiny.bert), bf16=True, torch_compile=False)
    trainer.train()
    assert callback.schedule.steps == 6
    assert {quantizer.scale.dtype for _, quantizer in fq.nn.named_quantizers(model)} == {torch.float32}
    assert all(quantizer.scale.isfinite().all() for _, quantizer in fq.nn.named_quantizers(model))


def test_huggingface_loads_the_best_model_at_the_end_with_its_scales(tmp_path):
    model, best = prepared(tiny.bert), []

    class Best(transformers.TrainerCallback):
        def on_save(self, args, state, control, model=None, **_):
            if state.best_global_step == state.global_step:
                best.append(saved(model.eval()))

    trainer = trainer_of(
        model, tmp_path, QATCallback(freeze_ranges_at=2), Best(), data=tiny.data_for(tiny.bert), save_strategy="steps",
        save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, greater_is_better=True,
        metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step < 6  # not the last one
    assert_same_state(best[-1], saved(model.eval()))


def test_huggingface_callback_refuses_a_float_model(tmp_path):
    with pytest.raises(ValueError, match=r"no quantizers in the model, a BertForS.*\n.*fakequant\.prepare"):
        trainer_of(tiny.bert(), tmp_path, QATCallback(), data=tiny.data_for(tiny.bert))


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "8"])
def test_huggingface_callback_refuses_invalid_numbers_of_batches(bad):
    with pytest.raises(ValueError, match="`calibrate` must be a number of batches, 1 or more, or None"):
        QATCallback(calibrate=bad)


def test_huggingface_callback_refuses_wrong_options(tmp_path):
    with pytest.raises(TypeError, match="`log_health` must be True or False, got 10"):
        QATCallback(log_health=10)
    trainer = trainer_of(prepared(tiny.bert), tmp_path, QATCallback(quantize_from=0.5), data=tiny.data_for(tiny.bert))
    with pytest.raises(ValueError, match="`quantize_from` must be a number of steps or None"):
        trainer.train()


CHECKPOINTED = sampled(
    {
        "bert": (tiny.bert, False),
        "bert, reentrant": (tiny.bert, True),
        "gpt2": (tiny.gpt2, False),
        "gpt2, reentrant": (tiny.gpt2, True),
    },
    "gpt2, reentrant",
)


@pytest.mark.parametrize(("make", "reentrant"), CHECKPOINTED.values(), ids=CHECKPOINTED)
def test_gradient_checkpointing_gives_the_same_bits(make, reentrant, tmp_path):
    trained = []
    for on in (False, True):
        model = prepared(make)
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}} if on else {}
        trainer = trainer_of(
            model, tmp_path, QATCallback(quantize_from=1), data=tiny.data_for(make), max_steps=3,
            gradient_checkpointing=on, **options,
        )  # fmt: skip
        trainer.train()
        trained.append(model)
    tiny.assert_same_everything(*trained)
