"""`QATCallback` in Lightning's `Trainer`."""

import csv
import importlib

import pytest

pytest.importorskip("lightning", reason="tests its Trainer")
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fakequant as fq
from fakequant.integrations.lightning import QATCallback
from fakequant.testing.assertions import assert_same_state

SCHEDULE = {"quantize_from": 1, "freeze_ranges_at": 5, "freeze_norms_at": 7}
pytestmark = [
    # Loaders of tiny data have no workers.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # Lightning uses a name that this torch has deprecated.
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.* is deprecated:FutureWarning"),
]


def make_net(config=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 3))
    return net if config is False else fq.prepare(net, config or fq.recipes.int8(), torch.ones(2, 6))


def make_modules(pl):
    """Returns module classes of one of Lightning's two packages, without and with a `forward`."""

    class Stepping(pl.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net
            self.seen = []

        def training_step(self, batch, batch_idx):
            x, label = batch
            if self.training:
                self.seen.append(x.clone())
            loss = nn.functional.cross_entropy(self.net(x), label)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.AdamW(fq.nn.param_groups(self), lr=0.01)

    class Calling(Stepping):
        def forward(self, x):
            return self.net(x)

    return Stepping, Calling


Stepping, Calling = make_modules(lightning.pytorch)


def make_data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(24, 6, generator=generator), torch.randint(3, (24,), generator=generator))


def fit(module, callback, folder, *others, pl=lightning.pytorch, ckpt_path=None, shuffle=True, **options):
    options = {"max_steps": 12, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 2, **options}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*([] if callback is None else [callback]), *others], **options,
    )  # fmt: skip
    data = make_data()
    trainer.fit(module, DataLoader(data, 4, shuffle=shuffle), DataLoader(data, 8), ckpt_path=ckpt_path)
    return trainer


def everything(net):
    found = dict(net.state_dict())
    for path, module in net.named_modules():
        found[f"{path} is in training"] = torch.tensor(module.training)
        if isinstance(module, fq.nn.QuantizedLayer):
            found[f"{path} deploys its bias"] = torch.tensor(module._fakequant.deploys_bias)
    return found


def assert_same_everything(one, other):
    assert_same_state(everything(one), everything(other))


# A resumed training finds its checkpoints there.
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("config", [fq.recipes.int8(), fq.recipes.lsq(4)], ids=["int8", "lsq"])
def test_a_resumed_lightning_training_gives_the_same_bits(config, tmp_path):
    def train(ckpt_path=None):
        net, callback = make_net(config), QATCallback(**SCHEDULE)
        net[3] = nn.Identity()  # Lightning does not save random states
        saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1)
        fit(
            Calling(net), callback, tmp_path, saves, ckpt_path=ckpt_path, enable_checkpointing=True, shuffle=False,
            max_steps=-1, max_epochs=4, accumulate_grad_batches=2,
        )  # fmt: skip
        return net, callback

    straight, first = train()
    [saved] = tmp_path.glob("epoch=1-*.ckpt")
    assert torch.load(saved, weights_only=True)["callbacks"]["QATCallback"] == {"steps": 6}
    resumed, second = train(saved)
    assert_same_everything(straight, resumed)
    assert first.schedule.state_dict() == second.schedule.state_dict() == {"steps": 12}
    assert not resumed[1].training  # the schedule has frozen the batch norm
    assert all(quantizer.frozen for _, quantizer in fq.nn.named_quantizers(resumed))


@pytest.mark.parametrize("make", [Stepping, Calling])
def test_lightning_callback_calibrates_before_the_sanity_check(make, tmp_path):
    with pytest.raises(RuntimeError, match="has not observed a finite value"):
        fit(make(make_net()), QATCallback(calibrate=None), tmp_path)
    callback = QATCallback(**SCHEDULE)
    trainer = fit(make(make_net()), callback, tmp_path)
    assert callback.schedule.steps == trainer.global_step == 12
    assert "val_loss" in trainer.callback_metrics


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lightning_optimizer_steps_advance_the_schedule_once(precision, tmp_path):
    net, callback = make_net(fq.recipes.lsq(4)), QATCallback(**SCHEDULE)
    module = Calling(net)
    trainer = fit(module, callback, tmp_path, precision=precision, accumulate_grad_batches=2, max_steps=5)
    assert len(module.seen) == 10
    assert callback.schedule.steps == trainer.global_step == 5
    assert {quantizer.scale.dtype for _, quantizer in fq.nn.named_quantizers(net)} == {torch.float32}


def test_lightning_callback_logs_health(tmp_path):
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    trainer = fit(Calling(make_net()), QATCallback(**SCHEDULE), tmp_path, logger=logger, accumulate_grad_batches=2)
    names = {name for name in trainer.logged_metrics if name.startswith("quant/")}
    expected = ("clipped", "levels_used", "scale_drift", "oscillating", "bias_error", "scale", "min", "max")
    assert names == {f"quant/{name}_{which}" for name in expected for which in ("mean", "worst")} | {"quant/nonfinite"}
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        logged = [row for row in csv.DictReader(file) if row["loss"]]
    assert [row["step"] for row in logged] == ["1", "3", "5", "7", "9", "11"]
    assert all(0 < float(row["quant/levels_used_worst"]) <= 1 for row in logged)


def test_lightning_callback_logs_no_health_if_switched_off(tmp_path):
    trainer = fit(Calling(make_net()), QATCallback(log_health=False), tmp_path, max_steps=4)
    assert [name for name in trainer.logged_metrics if name.startswith("quant/")] == []


# Lightning warns about modules in eval mode.
@pytest.mark.filterwarnings("ignore:Found 1 module.* in eval mode at the start of training")
@pytest.mark.parametrize("make", [Stepping, Calling])
def test_lightning_calibration_leaves_batches_and_random_states_unchanged(make, tmp_path):
    """Batches, dropout and results equal those of a model calibrated beforehand."""
    begun = []

    class Recorder(lightning.pytorch.Callback):
        def on_fit_start(self, trainer, pl_module):
            begun.append({name: value.clone() for name, value in pl_module.net.state_dict().items()})
            assert "log" not in pl_module.__dict__

    def train(callback, state=None):
        net = make_net()
        if state is not None:
            net.load_state_dict(state)
        module = make(net)
        module.net[3].eval()
        modes = [part.training for part in module.modules()]
        lightning.seed_everything(3, verbose=False)
        fit(module, callback, tmp_path, Recorder())
        assert [part.training for part in module.modules()] == modes
        return net, module.seen, torch.get_rng_state()

    one, batches, random_state = train(QATCallback(calibrate=5))
    other, same_batches, same_random_state = train(QATCallback(calibrate=None), begun[0])
    assert len(batches) == len(same_batches) == 12
    assert all(torch.equal(a, b) for a, b in zip(batches, same_batches, strict=True))
    assert_same_everything(one, other)
    assert torch.equal(random_state, same_random_state)


def test_lightning_callback_can_freeze_ranges_from_the_first_step(tmp_path):
    net = make_net()
    fit(Calling(net), QATCallback(freeze_ranges_at=0), tmp_path, max_steps=2)
    assert all(quantizer.frozen for _, quantizer in fq.nn.named_quantizers(net))


def test_a_second_lightning_fit_restarts_the_schedule(tmp_path):
    net, callback = make_net(), QATCallback(**SCHEDULE)
    fit(Calling(net), callback, tmp_path, max_steps=6)
    assert callback.state_dict() == {"steps": 6}
    fit(Calling(net), callback, tmp_path, max_steps=2)  # another trainer, which starts at 0
    assert callback.state_dict() == {"steps": 2}
    assert not any(quantizer.frozen for _, quantizer in fq.nn.named_quantizers(net))


def test_lightning_callback_works_with_pytorch_lightning_too(tmp_path):
    """Both packages are often installed, with different classes."""
    pl = pytest.importorskip("pytorch_lightning")
    assert pl.Callback is not lightning.pytorch.Callback
    _, calling = make_modules(pl)
    callback = QATCallback(**SCHEDULE)
    trainer = fit(calling(make_net()), callback, tmp_path, pl=pl, max_steps=4)
    assert callback.schedule.steps == trainer.global_step == 4
    assert isinstance(callback, (pl.Callback, lightning.pytorch.Callback))


def test_lightning_callback_refuses_a_float_model(tmp_path):
    with pytest.raises(ValueError, match=r"no quantizers in the model, a Calling.*\n.*fakequant\.prepare"):
        fit(Calling(make_net(False)), QATCallback(), tmp_path)


def test_lightning_callback_refuses_manual_optimization_without_forward(tmp_path):
    module = Stepping(make_net())
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"Stepping has no `forward`.*\nDefine `forward`, override `calibration_step`"):
        fit(module, QATCallback(), tmp_path)


def test_lightning_callback_refuses_several_loaders(tmp_path):
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[QATCallback()], default_root_dir=tmp_path,
    )  # fmt: skip
    loaders = [DataLoader(make_data(), 4), DataLoader(make_data(), 4)]
    with pytest.raises(TypeError, match=r"a list of loaders.*\nUse fakequant\.calibrate"):
        trainer.fit(Calling(make_net()), loaders, DataLoader(make_data(), 8))


def test_lightning_callback_refuses_wrong_options(tmp_path):
    with pytest.raises(ValueError, match="`calibrate` must be a number of batches, 1 or more, or None"):
        QATCallback(calibrate=0)
    with pytest.raises(ValueError, match="`freeze_ranges_at` must be a number of steps or None"):
        fit(Calling(make_net()), QATCallback(freeze_ranges_at=-1), tmp_path)


def test_lightning_integration_without_lightning_names_the_install_command(monkeypatch):
    module = importlib.import_module("fakequant.integrations.lightning")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'needs lightning.*\n.*pip install "fakequant\[lightning\]"'):
        module._packages()
