"""`latency` times an exported file beside the float model in the same runtime."""

import json

import pytest

import fakequant as fq
from thoroughness import only_in_test_all

torch = pytest.importorskip("torch")
nn = torch.nn
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
recipes = pytest.importorskip("fakequant.recipes")
module = pytest.importorskip("fakequant._verify.latency")
opening = pytest.importorskip("fakequant._runtimes.session")
Session = pytest.importorskip("fakequant._runtimes.onnxruntime.session").OnnxRuntimeSession

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
SHORT = 0.01


def make(config, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    return fq.calibrate(fq.prepare(model, config, X), [X], progress=False)


def exported(model, path, x=X):
    (fq.export_executorch if path.suffix == ".pte" else fq.export_onnx)(model, path, x)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("latency")


@pytest.fixture
def float_models_are_written_once(monkeypatch, written):
    """Exporting a float model takes most of the time."""
    write = module.write_float

    def write_once(model, args, kwargs, file, where):
        key = file.path, str([tuple(x.shape) for x in (*args, *kwargs.values())])
        if key not in written:
            made = write(model, args, kwargs, file, where)
            written[key] = made.name, made.read_bytes()
        name, data = written[key]
        (where / name).write_bytes(data)
        return where / name

    monkeypatch.setattr(module, "write_float", write_once)


@pytest.fixture(scope="module")
def written():
    """Names and bytes of the files of float models."""
    return {}


@pytest.fixture(scope="module")
def int8(folder):
    model = make(recipes.int8(target="onnxruntime-x86"))
    return model, exported(model, folder / "int8.onnx")


@pytest.mark.usefixtures("float_models_are_written_once")
def test_fields_describe_the_file_the_batch_and_the_runtime(int8):
    model, path = int8
    found = fq.latency(model, path, X, threads=2, seconds=SHORT)
    assert (found.runtime, found.target, found.threads) == ("onnxruntime", "onnxruntime-x86", 2)
    assert found.shapes == [[4, 16]]
    assert found.kernels == {"0": "QGemm", "2": "QGemm"}
    assert (found.integers, found.floats) == (["0", "2"], {})
    assert found.integer_multiplications == found.multiplications == 4 * (16 * 32 + 32 * 3)
    assert 0 < found.best_ms <= found.median_ms
    assert 0 < found.float_best_ms <= found.float_median_ms
    assert found.ratio == found.median_ms / found.float_median_ms
    assert found.speedup == found.float_median_ms / found.median_ms
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert found.to_dict()["ratio"] == found.ratio


def test_text_has_both_times_and_the_share_in_integers():
    kernels, floats = {"a": "QGemm", "b": "Gemm"}, {"b": "its input is not quantized"}
    shown = str(
        module.Latency("onnxruntime", "generic", 1, [[4, 16], []], 0.5, 0.25, 2.0, 1.5, kernels, ["a"], floats, 100, 60)
    )
    assert shown == (
        "onnxruntime, 1 thread, batch of 4x16 and scalar\n\n"
        "milliseconds | median | best\n"
        "-------------+--------+-----\n"
        "file         | 0.5    | 0.25\n"
        "float model  | 2      | 1.5\n\n"
        "time over float: 0.25 (4.00 times as fast)\n"
        "in integers: 1 of 2 layers, 60.0% of the multiplications"
    )


def test_multiplications_that_were_not_counted_are_not_shown():
    kernels = {"a": "QGemm", "b": "QGemm"}
    found = module.Latency("onnxruntime", "generic", 1, [[4]], 1, 1, 1, 1, kernels, ["a", "b"], {}, 0, 0)
    assert str(found).endswith("in integers: 2 of 2 layers")
    assert found.share is None


@pytest.mark.usefixtures("float_models_are_written_once")
def test_model_is_not_changed(int8):
    model, path = int8
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    fq.latency(model, path, X, seconds=SHORT)
    assert model.training
    assert all(module.training for module in model.modules())
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("float_models_are_written_once")
def test_batch_may_be_a_tuple_with_labels_or_a_dict(int8):
    model, path = int8
    assert fq.latency(model, path, (X[:2], torch.zeros(2)), seconds=SHORT).shapes == [[2, 16]]
    assert fq.latency(model, path, {"input": X[:3]}, seconds=SHORT).shapes == [[3, 16]]


def test_float_model_has_the_opset_and_the_axes_of_the_file_and_its_results(folder):
    model = make(recipes.int8(target="onnxruntime-x86"))
    for opset, dynamic, axis in ((18, True, "batch"), (21, False, 4)):
        path = folder / f"{opset}.onnx"
        fq.export_onnx(model, path, X, opset=opset, dynamic_batch=dynamic)
        made = module.write_float(model, (X,), {}, opening.open_file(path), folder)
        written = onnx.load(made)
        assert written.opset_import[0].version == opset
        size = written.graph.input[0].type.tensor_type.shape.dim[0]
        assert (size.dim_param or size.dim_value) == axis
        (result,) = opening.open_file(made, "onnxruntime").run_unwatched((X,), {})
        with torch.no_grad():
            expected = nn.Sequential(*float_layers())(X)
        assert torch.allclose(torch.from_numpy(result), expected, atol=1e-5)


def float_layers():
    torch.manual_seed(0)
    return nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)


@pytest.mark.usefixtures("float_models_are_written_once")
def test_only_the_session_that_is_timed_is_made(int8, monkeypatch):
    model, path = int8
    made = []
    plain = Session._session

    def session(self, data, level):
        made.append((self.threads, len(onnx.ModelProto.FromString(data).graph.output)))
        return plain(self, data, level)

    monkeypatch.setattr(Session, "_session", session)
    fq.latency(model, path, X, threads=2, seconds=SHORT)
    assert made == [(2, 1), (2, 1)]  # the file and the float model, without codes as outputs


def test_unwatched_results_are_those_that_verify_compares(int8):
    _, path = int8
    for runtime in ("onnxruntime", "openvino"):
        if runtime == "openvino":
            pytest.importorskip("openvino")
        file = opening.open_file(path, runtime)
        assert (file.run_unwatched((X,), {})[0] == file.run((X,), {}).results[0]).all()


@pytest.mark.usefixtures("float_models_are_written_once")
def test_weight_only_layers_are_timed_at_the_accuracy_level_of_the_session(folder, monkeypatch):
    model = make(recipes.int4_weight_only(16))
    path = exported(model, folder / "int4.onnx")
    ran = []
    for name in ("run_with_rounding", "run_unwatched"):
        original = getattr(Session, name)

        def spy(self, *args, name=name, original=original):
            ran.append((name, self.path))
            return original(self, *args)

        monkeypatch.setattr(Session, name, spy)
    fq.latency(model, path, X, seconds=SHORT)
    assert ran.count(("run_unwatched", path)) == 1  # the check of the batch
    assert ("run_with_rounding", path) in ran
    ran.clear()
    found = fq.latency(model, path, X, seconds=SHORT, accuracy_level=1)
    assert ("run_with_rounding", path) not in ran
    assert (found.integers, list(found.floats), found.share) == ([], ["0", "2"], 0.0)


def test_openvino_times_both_files_itself(folder):
    pytest.importorskip("openvino")
    model = make(recipes.int8(target="openvino"))
    found = fq.latency(model, exported(model, folder / "openvino.onnx"), X, seconds=SHORT)
    assert (found.runtime, found.kernels["0"]) == ("openvino", "FullyConnected I8")
    assert found.median_ms > 0
    assert found.float_median_ms > 0


@only_in_test_all
def test_programs_are_timed_in_another_process_with_the_number_of_threads(folder):
    pytest.importorskip("executorch")
    from fakequant._runtimes.xnnpack.running import thread_count

    model = make(recipes.int8(target="xnnpack"))
    before = thread_count()
    path = exported(model, folder / "model.pte")
    found = fq.latency(model, path, X, threads=before + 1, seconds=SHORT)
    assert thread_count() == before
    assert (found.runtime, found.target, found.threads) == ("executorch", "xnnpack", before + 1)
    assert found.kernels == {"0": "XNNPACK int8", "2": "XNNPACK int8"}
    assert found.median_ms > 0
    assert found.float_median_ms > 0
    with pytest.raises(ValueError, match="does not belong to the model: a parameter is different"):
        fq.latency(make(recipes.int8(target="xnnpack"), seed=1), path, X)


def test_failures_of_the_other_process_are_reported(folder, monkeypatch):
    pytest.importorskip("executorch")
    from fakequant._runtimes.xnnpack import running

    monkeypatch.setattr(running.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="process that times programs of ExecuTorch failed: it ended with code 1"):
        running.times_of_programs({"file": folder / "model.pte"}, [X], 1, SHORT)


def test_files_of_other_models_are_not_timed(int8, folder):
    _, path = int8
    other = make(recipes.int8(target="onnxruntime-x86"), seed=1)
    with pytest.raises(ValueError, match=r"does not belong to the model: .* is different in the file"):
        fq.latency(other, path, X)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        fq.latency(other, folder / "missing.onnx", X)
    with pytest.raises(ValueError, match="The model is not prepared"):
        fq.latency(nn.Linear(16, 3), path, X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "`threads` must be a number of at least 1, got 0"),
        ({"threads": True}, "`threads` must be"),
        ({"seconds": 0}, "`seconds` must be a positive number, got 0"),
        ({"seconds": float("inf")}, "`seconds` must be"),
        ({"seconds": "1"}, "`seconds` must be"),
        ({"accuracy_level": 4}, "`accuracy_level` must be 1"),
        ({"runtime": "tflite"}, "`runtime` must be one of onnxruntime, openvino, executorch"),
    ],
)
def test_wrong_arguments_are_refused(options, message, int8):
    with pytest.raises(ValueError, match=message):
        fq.latency(*int8, X, **options)


def test_batch_that_does_not_fit_is_refused(int8):
    with pytest.raises(ValueError, match="cannot run the file on this batch"):
        fq.latency(*int8, torch.randn(4, 15))
    with pytest.raises(TypeError, match="`example` must be a tensor"):
        fq.latency(*int8, 3)
