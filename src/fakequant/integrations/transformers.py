"""Hugging Face transformers: a callback for its `Trainer`, and saving and loading of prepared models."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from fakequant._prepare.attach import FLOW_BUFFER, is_prepared, preparation
from fakequant._prepare.prepare import prepare_for_loading
from fakequant._util.packages import require
from fakequant.config import QuantConfig
from fakequant.integrations._training import (
    Batch,
    TrainingCallback,
    figures,
    first_batches,
    require_quantizers,
)
from fakequant.nn._model_quantizers import named_quantizers
from fakequant.nn._records import FACTORS, TOKENS

_transformers: Any = require("transformers", "transformers", "transformers")
_accelerate: Any = require("accelerate.utils", "accelerate", "transformers")
_safetensors: Any = require("safetensors.torch", "safetensors", "transformers")
if TYPE_CHECKING:
    _TrainerCallback = object  # the optional package has no types to derive from
else:
    _TrainerCallback = _transformers.TrainerCallback
# Classes of the optional package.
Trainer: TypeAlias = Any
TrainingArguments: TypeAlias = Any
TrainerState: TypeAlias = Any
TrainerControl: TypeAlias = Any
PreTrainedModel: TypeAlias = Any
_FIELD = "fakequant_config"  # the key in config.json


class QATCallback(TrainingCallback, _TrainerCallback):
    """Drives quantization-aware training in `transformers.Trainer`.

        before the first step     calibrates with the first training batches, if no activation quantizer has a scale
        after optimizer steps     advances a `fakequant.Schedule`, in steps of `state.global_step`
        when the loss is logged   adds the metrics of `fakequant.health`, named `quant/...`
        in checkpoints            saves the model with `save_pretrained` of this module

    A checkpoint contains the trainer's step, so a resumed training continues the same schedule. Calibration does not
    change the order of the data, random states or the mode of the model.

    Args:
        quantize_from: The step at which quantizers are switched on. See `fakequant.Schedule`.
        freeze_ranges_at: The step at which ranges are frozen.
        freeze_norms_at: The step at which the statistics of batch norms are frozen.
        calibrate: The number of batches for the calibration. If None, there is no calibration.
        log_health: Whether to log the metrics of `fakequant.health`.

    >>> from transformers import Trainer
    >>> callback = QATCallback(freeze_ranges_at=800, calibrate=16)
    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])  # doctest: +SKIP
    """

    def add_to(self, trainer: Trainer) -> None:
        """Adds the callback to a trainer, before all others.

        With `Trainer(callbacks=...)`, the callbacks of `report_to`, such as TensorBoard's, run before this one and do
        not see its metrics.
        """
        trainer.callback_handler.callbacks.insert(0, self)

    def calibration_step(self, model: nn.Module, batch: Batch) -> None:
        """Calls `model(**batch)`. Override it for a model that is called differently."""
        model(**batch)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Raises ValueError if the model is not prepared."""
        require_quantizers(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Calibrates the model if necessary, and creates the schedule."""
        require_quantizers(model)
        if isinstance(model, _transformers.PreTrainedModel) and is_prepared(model):
            # The trainer calls this method to write checkpoints.
            model.save_pretrained = MethodType(save_pretrained, model)
        self._start(
            model,
            {"steps": state.global_step},
            lambda number: first_batches(train_dataloader, number),
            lambda first: self._show(model, first, args.device),
        )

    def _show(self, model: nn.Module, batches: Iterator[Batch], device: torch.device) -> None:
        for batch in batches:
            self.calibration_step(model, _accelerate.send_to_device(batch, device))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Advances the schedule by one optimizer step."""
        assert self.schedule is not None
        self.schedule.step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Adds metrics to the trainer's log of the training loss."""
        if not self.log_health or logs is None or "loss" not in logs:
            return
        found = figures(model, self._memory)
        logs.update(found)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)


def save_pretrained(model: PreTrainedModel, folder: str | os.PathLike[str], **options: Any) -> None:
    """Calls `model.save_pretrained(folder, **options)` of a prepared model, with its `QuantConfig` in config.json.

    Tensors are saved under their names in the model, which `Trainer` needs to resume, not under the names of older
    versions of transformers (`save_original_format=False`).

    >>> import tempfile
    >>> import fakequant as fq
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    >>> model = fq.prepare(model, fq.recipes.int4_weight_only(8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, folder)
    ...     again = from_pretrained(BertModel, folder)
    >>> again.pooler.dense.weight_quantizer.spec.bits
    4
    """
    setattr(model.config, _FIELD, preparation(model).config.to_dict())
    type(model).save_pretrained(model, folder, **{"save_original_format": False, **options})


def from_pretrained(
    cls: Any, folder: str | os.PathLike[str], *, quant_config: QuantConfig | None = None, **options: Any
) -> PreTrainedModel:
    """Loads a prepared model from a folder that `save_pretrained` or a `Trainer` with `QATCallback` wrote.

    Every parameter and every quantizer has exactly the saved values. The model is in evaluation mode.

    Args:
        cls: The class of the saved model, or an `AutoModelFor...`.
        folder: The folder with the model.
        quant_config: The config with which the model was prepared. None to read it from the folder, which is not
            possible if the model's own `save_pretrained` wrote it.
        **options: Options of `cls.from_pretrained`.

    >>> import tempfile
    >>> import fakequant as fq
    >>> from transformers import BertConfig, BertModel
    >>> config = fq.recipes.int8()
    >>> model = BertModel(BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    >>> model = fq.prepare(model, config, example={"input_ids": torch.ones(1, 2, dtype=torch.int64)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     again = from_pretrained(BertModel, folder, quant_config=config)
    >>> torch.equal(again.pooler.dense.weight, model.pooler.dense.weight)
    True
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(folder)!r} to load a prepared model from.\n"
            "Pass a local folder; huggingface_hub.snapshot_download(name) returns one for a name on the Hub."
        )
    if quant_config is None:
        quant_config = _saved_config(path)
    with _quiet():  # transformers warns about the tensors of quantizers, which are checked below
        model, report = cls.from_pretrained(path, output_loading_info=True, **options)
    model = prepare_for_loading(model, quant_config)
    _add_results(model, path)
    own = [f"{place}.{name}" for place, quantizer in named_quantizers(model) for name in quantizer.state_dict()]
    own += [name for name, _ in model.named_buffers() if name.rpartition(".")[2] in (TOKENS, FACTORS)]
    _require_same_model(path, type(model), report, set(own))
    model.load_state_dict(_read_quantizers(model, path, own), strict=False)
    return model


def _add_results(model: PreTrainedModel, folder: Path) -> None:
    """Adds the quantizers of results that the saved model had because it was run on an example."""
    file = _files(folder).get(FLOW_BUFFER)
    if file is not None:
        with _safetensors.safe_open(folder / file, framework="pt") as opened:
            saved = opened.get_tensor(FLOW_BUFFER)
        try:
            model.load_state_dict({FLOW_BUFFER: saved}, strict=False)
        except ValueError as error:
            raise ValueError(_not_of(folder, type(model), f"{error.__cause__}")) from error


def _saved_config(folder: Path) -> QuantConfig:
    file = folder / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8")).get(_FIELD) if file.is_file() else None
    if fields is None:
        raise ValueError(
            f"{file} has no {_FIELD!r}, which says how the model was prepared: it was saved neither by "
            "fakequant.integrations.transformers.save_pretrained nor by a Trainer with QATCallback.\n"
            "Pass `quant_config`, the QuantConfig with which the model was prepared."
        )
    return QuantConfig.from_dict(fields)


@contextmanager
def _quiet() -> Iterator[None]:
    logging = _transformers.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _require_same_model(folder: Path, cls: type, report: Mapping[str, Any], own: set[str]) -> None:
    """Raises ValueError unless the folder has exactly the tensors of the prepared model."""
    missing, unknown = sorted(report["missing_keys"]), sorted(set(report["unexpected_keys"]) - own - {FLOW_BUFFER})
    mismatched = sorted(map(str, report["mismatched_keys"]))
    for names, problem in ((missing, "it lacks"), (mismatched, "it has other shapes of"), (unknown, "it also has")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(_not_of(folder, cls, f"{problem} {names[0]}{more}"))


def _not_of(folder: Path, cls: type, problem: str) -> str:
    return (
        f"{folder} does not hold a {cls.__name__} that was prepared with this config: {problem}.\n"
        "Pass the class and the `quant_config` of the model that was saved."
    )


def _read_quantizers(model: PreTrainedModel, folder: Path, own: list[str]) -> dict[str, Tensor]:
    """Returns the tensors of quantizers in a folder, by their names in the model."""
    files = _files(folder)
    absent = [name for name in own if name not in files]
    renamed = _names_on_saving(model, absent) if absent else {}
    lost = [name for name in absent if renamed.get(name) not in files]
    if lost:
        raise ValueError(
            f"{folder} lacks {len(lost)} of {len(own)} tensors of quantizers, such as {lost[0]}.\n"
            "Save the prepared model with fakequant.integrations.transformers.save_pretrained, and pass the "
            "`quant_config` with which it was prepared."
        )
    saved = {name: renamed.get(name, name) for name in own}
    found: dict[str, Tensor] = {}
    for file in {files[name] for name in saved.values()}:
        with _safetensors.safe_open(folder / file, framework="pt") as opened:
            found |= {name: opened.get_tensor(there) for name, there in saved.items() if files[there] == file}
    return found


def _files(folder: Path) -> dict[str, str]:
    """Returns the name of the file that contains each tensor of a folder, by tensor name."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    file = folder / "model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no model.safetensors.\nPass a folder that save_pretrained wrote.")
    with _safetensors.safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file.name)


def _names_on_saving(model: PreTrainedModel, names: list[str]) -> dict[str, str]:
    """Returns the names under which the model's own `save_pretrained` saves tensors, for some classes old names."""
    numbers = {name: torch.tensor(number) for number, name in enumerate(names)}
    with tempfile.TemporaryDirectory() as folder:
        type(model).save_pretrained(model, folder, state_dict=numbers)
        saved = _safetensors.load_file(f"{folder}/model.safetensors")
    return {names[int(number)]: name for name, number in saved.items()}
