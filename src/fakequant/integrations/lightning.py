"""Lightning: a callback for its `Trainer`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from fakequant._model.running import call_arguments
from fakequant.integrations._training import Batch, TrainingCallback, figures, first_batches


def _packages() -> list[ModuleType]:
    """Returns whichever of `lightning.pytorch` and `pytorch_lightning`, two copies of one library, are installed."""
    found = [
        import_module(name)
        for name in ("lightning.pytorch", "pytorch_lightning")
        if find_spec(name.partition(".")[0]) is not None
    ]
    if not found:
        raise ImportError('This needs lightning, which is not installed.\nUse: pip install "fakequant[lightning]"')
    return found


_PACKAGES = _packages()
# Classes of either copy, which have no common base.
Trainer: TypeAlias = Any
LightningModule: TypeAlias = Any
# Each copy accepts only instances of its own Callback class.
if TYPE_CHECKING:
    _Callbacks = object  # the classes are known at run time only
else:
    _Callbacks = type("_Callbacks", tuple(package.Callback for package in _PACKAGES), {})


class QATCallback(TrainingCallback, _Callbacks):
    """Drives quantization-aware training in a Lightning `Trainer`. The model, or a part of it, must be prepared.

        when `fit` starts         calibrates with the first training batches, if no activation quantizer has a scale;
                                  this happens before the sanity check
        after optimizer steps     advances a `fakequant.Schedule`, in steps of `trainer.global_step`
        when the trainer logs     adds the metrics of `fakequant.health`, named `quant/...`
        in checkpoints            saves the state of the schedule as the callback's state

    Calibration does not change the order of the data, random states or the mode of the model.

    Args:
        quantize_from: The step at which quantizers are switched on. See `fakequant.Schedule`.
        freeze_ranges_at: The step at which ranges are frozen.
        freeze_norms_at: The step at which the statistics of batch norms are frozen.
        calibrate: The number of batches for the calibration. If None, there is no calibration.
        log_health: Whether to log the metrics of `fakequant.health`.

    >>> import lightning
    >>> callback = QATCallback(freeze_ranges_at=800, calibrate=16)
    >>> trainer = lightning.Trainer(max_steps=1000, callbacks=[callback])  # doctest: +SKIP
    """

    _loaded: dict[str, Any] | None = None  # a loaded state, until the schedule exists
    _global_step = 0  # trainer.global_step at the last update of the schedule

    def calibration_step(self, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        """Passes one batch through the model. Override it if the model needs another call.

        Calls `forward` with the part of the batch that it takes, so a batch may contain labels. If the module does not
        define `forward`, calls `training_step` with logging disabled.
        """
        if not any(type(pl_module).forward is package.LightningModule.forward for package in _PACKAGES):
            args, kwargs = call_arguments(pl_module, batch)
            pl_module(*args, **kwargs)
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(pl_module).__name__} has no `forward`, and its `training_step` steps its optimizers itself "
                "(automatic_optimization=False), so neither can be used for calibration.\n"
                "Define `forward`, override `calibration_step` of the callback, or use QATCallback(calibrate=None) and "
                "fakequant.calibrate before `fit`."
            )
        with _not_logging(pl_module):
            pl_module.training_step(batch, batch_idx)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Resets the schedule: every `fit` has a new one."""
        if stage == "fit":
            self.schedule = self._loaded = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calibrates the model if necessary, and creates the schedule."""

        def batches(number: int) -> Iterator[Batch]:
            trainer.fit_loop.setup_data()
            return first_batches(_loader(trainer), number)

        state = self._loaded or {"steps": trainer.global_step}
        self._start(pl_module, state, batches, lambda first: self._show(trainer, pl_module, first))
        self._loaded = None

    def _show(self, trainer: Trainer, pl_module: LightningModule, batches: Iterator[Batch]) -> None:
        for index, batch in enumerate(batches):
            # The same steps as in training.
            batch = trainer.precision_plugin.convert_input(batch)
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            with trainer.precision_plugin.forward_context():
                self.calibration_step(pl_module, batch, index)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stores the step at which the trainer starts or resumes, which is known only now."""
        self._global_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        """Advances the schedule by the optimizer steps of the batch, and logs metrics when the trainer logs."""
        assert self.schedule is not None
        made = trainer.global_step - self._global_step
        for _ in range(made):
            self.schedule.step()
        self._global_step = trainer.global_step
        if made and self.log_health and trainer._logger_connector.should_update_logs:
            pl_module.log_dict(figures(pl_module, self._memory), on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the schedule."""
        return {} if self.schedule is None else self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of the schedule from a checkpoint."""
        if self.schedule is None:
            self._loaded = state_dict or None
        else:
            self.schedule.load_state_dict(state_dict)


def _loader(trainer: Trainer) -> Iterable[Batch]:
    loader: Iterable[Batch] = trainer.train_dataloader
    if isinstance(loader, (dict, list, tuple)):
        raise TypeError(
            f"The training data is a {type(loader).__name__} of loaders, but QATCallback can calibrate with only one.\n"
            "Use fakequant.calibrate(model, batches) before `fit`, and QATCallback(calibrate=None)."
        )
    return loader


@contextmanager
def _not_logging(pl_module: LightningModule) -> Iterator[None]:
    """Disables `log` and `log_dict`, because the trainer does not accept metrics at this point."""
    names = ("log", "log_dict")
    for name in names:
        pl_module.__dict__[name] = lambda *_, **__: None
    try:
        yield
    finally:
        for name in names:
            del pl_module.__dict__[name]
