"""`LitertExport` says truly what is computed in float and why, and how much memory tensors need."""

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
pytest.importorskip("ai_edge_litert.interpreter")
recipes = pytest.importorskip("fakequant.recipes")
graphs = pytest.importorskip("fakequant._export.litert.graph")
reports = pytest.importorskip("fakequant._export.litert.report")

NO_INPUT = "its input is not quantized"
IN_FLOAT = "the target computes it in float, whatever kernels LiteRT has"
NO_GRIDS = "its operands or its result are not quantized, or LiteRT has no kernel for their scales or types"


class Operators(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.first(nn.functional.max_pool2d(x, 2))  # the input is quantized behind the pool
        x = self.second(nn.functional.max_pool2d(x, 2))  # this pool moves codes
        y = nn.functional.avg_pool2d(x, 2, 1)
        return (
            torch.sigmoid(y),
            (x > 0.1).logical_and(x < 3),
            y + 1,
            nn.functional.pad(x, (1, 1), value=2.0),
            x.argmax(1),
        )


def test_reasons(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 14, 14)
    model = fq.calibrate(fq.prepare(Operators().eval(), recipes.int8(target="litert"), x), [x], progress=False)
    report = fq.export_litert(model, tmp_path / "m.tflite", x)
    assert report.operators["MAX_POOL_2D"] == 2
    names = "AVERAGE_POOL_2D", "LOGISTIC", "GREATER", "LESS", "PADV2", "ARG_MAX"
    expected = {"MAX_POOL_2D": NO_INPUT, "ADD": NO_GRIDS} | dict.fromkeys(names, IN_FLOAT)
    assert {one.name: one.why for one in report.others} == expected
    assert len(report.others) == len(expected)
    assert {one.how for one in (*report.layers, *report.others)} == {"int8", "float"}


def test_inputs_need_memory_from_the_start():
    graph = graphs.Graph()
    early, late = (graphs.Tensor((number,), "float32") for number in (10, 1000))
    graph.inputs += [("early", early), ("late", late)]
    large = graph.add("TILE", [early], [graphs.Tensor((500,), "float32")])
    small = graph.add("SUM", [large], [graphs.Tensor((1,), "float32")])
    graph.outputs.append(("y", graph.add("MUL", [small, late], [graphs.Tensor((1000,), "float32")])))
    # The first operator needs both inputs, and the last one `late` and its own result.
    assert reports.report_of(graph, 0, has_any_batch=False).tensor_bytes == 4 * max(10 + 1000 + 500, 1 + 1000 + 1000)
    graph.operators[2].inputs = [small]
    graph.outputs[:] = [("y", small)]
    assert reports.report_of(graph, 0, has_any_batch=False).tensor_bytes == 4 * (10 + 1000 + 500)
