"""What a random network is made of. Each construct adds a few statements to a draft; none avoids what fails."""

from collections.abc import Callable

from drafts import Draft, UnsuitableError

# The weight of a construct is how often it is drawn, beside the others.
CONSTRUCTS: dict[Callable[[Draft], None], float] = {}

ACTIVATIONS = {
    "ReLU": "F.relu",
    "ReLU6": "F.relu6",
    "GELU": "F.gelu",
    "SiLU": "F.silu",
    "ELU": "F.elu",
    "LeakyReLU": "F.leaky_relu",
    "PReLU": None,
    "Hardswish": "F.hardswish",
    "Hardsigmoid": "F.hardsigmoid",
    "Tanh": "torch.tanh",
    "Sigmoid": "torch.sigmoid",
    "Softplus": "F.softplus",
    "Mish": "F.mish",
}
IN_PLACE = ("ReLU", "ReLU6", "SiLU", "ELU", "LeakyReLU", "Hardswish", "Hardsigmoid", "Mish")
WEIGHTS = (14, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2)


def construct(weight: float):
    """Registers a function that adds a construct to a draft."""

    def register(function: Callable[[Draft], None]) -> Callable[[Draft], None]:
        CONSTRUCTS[function] = weight
        return function

    return register


def width(draft: Draft) -> int:
    """Returns a number of channels."""
    return draft.random.choice((2, 3, 4, 5, 6, 8, 8, 12, 16))


def linear(draft: Draft, inputs: int, outputs: int) -> str:
    """Adds a linear layer and returns the expression of its module."""
    bias = ", bias=False" if draft.chance(0.25) else ""
    layer = draft.module("linear", f"nn.Linear({inputs}, {outputs}{bias})")
    tweak(draft, layer)
    return layer


def tweak(draft: Draft, layer: str) -> None:
    """Sometimes gives a layer weights that are hard to quantize."""
    if not draft.chance(0.2):
        return
    has_bias = draft.value(f"{layer}.bias") is not None
    tweaks = [
        f"{layer}.weight.data[0] = 0  # a dead channel",
        f"{layer}.weight.data *= {draft.random.choice(('1e4', '1e5', '1e6'))}",
        f"{layer}.weight.data *= {draft.random.choice(('1e-4', '1e-5', '1e-6'))}",
        f"{layer}.weight.data[0] *= {draft.random.choice(('1e3', '1e-3'))}",
        f"{layer}.weight.data.mul_(8).round_().div_(8)  # ties",
        f"{layer}.weight.data.zero_()",
    ]
    if has_bias:
        tweaks += [f"{layer}.bias.data *= {draft.random.choice(('1e4', '1e-5'))}", f"{layer}.bias.data.fill_(0.5)"]
        tweaks += [f"{layer}.weight.data[-1] = 0; {layer}.bias.data[-1] = 3  # a constant channel"]
    for part in draft.random.choice(tweaks).split("; "):
        draft.setup(part)


def activate(draft: Draft, x: str) -> str:
    """Applies an activation: as a function, in place, with a module, or with one that the whole network shares."""
    kind = draft.random.choices(list(ACTIVATIONS), WEIGHTS)[0]
    style = draft.random.choice(("function", "module", "shared", "in place"))
    if draft.is_sharing and draft.chance(0.7):
        kind, style = "ReLU", "shared"
    if kind == "PReLU":
        channels = draft.random.choice(("", str(draft.shape(x)[1])))
        return draft.let(f"{draft.module('prelu', f'nn.PReLU({channels})')}({x})")
    if style == "in place" and kind in IN_PLACE and x not in draft.inputs:
        if kind == "ReLU" and draft.chance(0.5):
            draft.do(f"F.relu_({x})")
            return x
        return draft.let(f"{draft.module(kind.lower(), f'nn.{kind}(inplace=True)')}({x})")
    if style == "shared":
        return draft.let(f"{draft.shared(kind.lower(), f'nn.{kind}()')}({x})")
    if style == "module":
        return draft.let(f"{draft.module(kind.lower(), f'nn.{kind}()')}({x})")
    return draft.let(f"{ACTIVATIONS[kind]}({x})")


def convolution(draft: Draft, x: str, outputs: int, *, same: bool = False) -> str:
    """Adds a convolution of any kind and returns the expression of its module."""
    channels, sizes = draft.shape(x)[1], draft.shape(x)[2:]
    kernel = draft.random.choice((1, 3, 3, 3, 2, 5))
    options = []
    kind = draft.random.choice(("plain", "plain", "grouped", "depthwise", "dilated", "strided", "padded"))
    if same:
        kernel, kind, options = 3, draft.random.choice(("plain", "depthwise")), ["padding=1"]
    if kind == "grouped":
        groups = next((n for n in (2, 3, 4) if channels % n == 0), 1)
        outputs = groups * max(1, outputs // groups)
        options.append(f"groups={groups}")
    elif kind == "depthwise":
        outputs = channels * draft.random.choice((1, 1, 2)) if not same else channels
        options.append(f"groups={channels}")
    elif kind == "dilated":
        options.append("dilation=2")
    elif kind == "strided":
        options.append("stride=2")
    elif kind == "padded":
        options += ["padding=1", f"padding_mode={draft.random.choice(('reflect', 'replicate', 'circular'))!r}"]
    if not same and kind != "padded" and draft.chance(0.5):
        options.append(f"padding={draft.random.choice((1, 1, 2))}")
    if draft.chance(0.25):
        options.append("bias=False")
    axes = len(sizes)
    layer = draft.module("conv", f"nn.Conv{axes}d({channels}, {outputs}, {', '.join([str(kernel), *options])})")
    tweak(draft, layer)
    return layer


def steps(draft: Draft) -> str:
    """Returns a sequence of few steps: some exporters write every step of a recurrent layer."""
    x = draft.pick(3)
    if draft.shape(x)[1] > 7:
        raise UnsuitableError
    return x


def any_layer(draft: Draft, x: str) -> str:
    """Applies a linear layer or a convolution."""
    dims = len(draft.shape(x))
    if dims == 5 or (dims in (3, 4) and draft.chance(0.7)):
        return draft.let(f"{convolution(draft, x, width(draft))}({x})")
    return draft.let(f"{linear(draft, draft.shape(x)[-1], width(draft))}({x})")


def same_shape_layer(draft: Draft, x: str) -> str:
    """Returns the expression of a new module whose result has the shape of its argument."""
    shape = draft.shape(x)
    if len(shape) == 4 or (len(shape) == 3 and draft.chance(0.4)):
        return convolution(draft, x, shape[1], same=True)
    return linear(draft, shape[-1], shape[-1])


@construct(10)
def layer(draft: Draft) -> None:
    any_layer(draft, draft.pick(2, 3, 4, 5))


@construct(8)
def layer_and_activation(draft: Draft) -> None:
    activate(draft, any_layer(draft, draft.pick(2, 3, 4, 5)))


@construct(5)
def layer_norm_activation(draft: Draft) -> None:
    """A block as in most vision networks."""
    h = any_layer(draft, draft.pick(3, 4, 5))
    dims = len(draft.shape(h))
    norm = draft.module("norm", f"nn.BatchNorm{dims - 2}d({draft.shape(h)[1]})")
    if draft.chance(0.5):
        draft.setup(f"{norm}.running_mean.fill_(0.3)")
        draft.setup(f"{norm}.weight.data[0] = {draft.random.choice(('-1.5', '0.0', '20.0'))}")
    activate(draft, draft.let(f"{norm}({h})"))


@construct(2)
def transposed_convolution(draft: Draft) -> None:
    x = draft.pick(3, 4)
    axes, channels = len(draft.shape(x)) - 2, draft.shape(x)[1]
    options = draft.random.choice(("2, stride=2", "3, stride=2, padding=1", "3, padding=1, bias=False", "2"))
    layer = draft.module("up", f"nn.ConvTranspose{axes}d({channels}, {width(draft)}, {options})")
    tweak(draft, layer)
    draft.let(f"{layer}({x})")


@construct(3)
def shared_layer(draft: Draft) -> None:
    """A layer that is called twice or three times, on different tensors."""
    x = draft.pick(2, 3, 4)
    layer = same_shape_layer(draft, x)
    others = [name for name in draft.others(x) if draft.chance(0.7)]
    first = draft.let(f"{layer}({x})")
    if others:
        second = draft.let(f"{layer}({draft.random.choice(others)})")
        draft.let(f"{first} + {second}")
    else:
        second = draft.let(f"{layer}({activate(draft, first)})")
        if draft.chance(0.4):
            draft.let(f"{layer}({second} * 0.5)")


@construct(2)
def function_with_parameters(draft: Draft) -> None:
    """F.linear or F.conv2d with parameters of the network."""
    x = draft.pick(2, 3, 4)
    shape = draft.shape(x)
    outputs = width(draft)
    weight = draft.fresh().replace("h", "weight")
    sizes = f"{outputs}, {shape[1]}, 3, 3" if len(shape) == 4 else f"{outputs}, {shape[-1]}"
    draft.setup(f"self.{weight} = nn.Parameter(torch.randn({sizes}) / 4)")
    bias = ""
    if draft.chance(0.6):
        draft.setup(f"self.{weight}_bias = nn.Parameter(torch.randn({outputs}) / 4)")
        bias = f", self.{weight}_bias"
    draft.let(
        f"F.conv2d({x}, self.{weight}{bias}{', padding=1' if draft.chance(0.5) else ''})"
        if len(shape) == 4
        else f"F.linear({x}, self.{weight}{bias})"
    )


@construct(2)
def function_with_weight_of_layer(draft: Draft) -> None:
    """F.linear or F.conv2d with the weight of a layer that is called as well."""
    x = draft.pick(2, 3, 4)
    layer = same_shape_layer(draft, x)
    first = draft.let(f"{layer}({x})")
    weight = draft.shape(f"{layer}.weight")
    if len(weight) == 2:
        draft.let(f"F.linear({first}, {layer}.weight)")
    elif len(weight) == 4 and weight[1] == weight[0]:
        draft.let(f"F.conv2d({first}, {layer}.weight, {layer}.bias, padding=1)")
    else:
        raise UnsuitableError


@construct(3)
def activation(draft: Draft) -> None:
    activate(draft, draft.pick(2, 3, 4, 5))


@construct(1)
def softmax(draft: Draft) -> None:
    x = draft.pick(2, 3, 4)
    axis = draft.random.choice((1, -1))
    draft.let(draft.random.choice((f"{x}.softmax({axis})", f"{draft.module('softmax', f'nn.Softmax({axis})')}({x})")))


@construct(4)
def residual(draft: Draft) -> None:
    x = draft.pick(2, 3, 4)
    h = draft.let(f"{same_shape_layer(draft, x)}({x})")
    if draft.chance(0.5):
        h = draft.let(f"{same_shape_layer(draft, h)}({activate(draft, h)})")
    total = draft.let(f"{x} + {h}")
    if draft.chance(0.5):
        activate(draft, total)


@construct(3)
def branches(draft: Draft) -> None:
    """Two layers read one tensor, and a third reads what they make together."""
    x = draft.pick(2, 3, 4)
    a = draft.let(f"{same_shape_layer(draft, x)}({x})")
    b = draft.let(f"{same_shape_layer(draft, x)}({x})")
    if draft.chance(0.5):
        a = activate(draft, a)
    joined = draft.random.choice(
        (
            f"torch.cat([{a}, {b}], 1)",
            f"torch.cat([{a}, {b}, {x}], -1)",
            f"{a} + {b}",
            f"{a} - {b}",
            f"{a} * {b}",
            f"torch.maximum({a}, {b})",
        )
    )
    any_layer(draft, draft.let(joined))


@construct(4)
def gate(draft: Draft) -> None:
    x = draft.pick(2, 3, 4)
    a = draft.let(f"{same_shape_layer(draft, x)}({x})")
    weights = draft.random.choice((f"torch.sigmoid({a})", f"torch.tanh({a})", f"{a}.softmax(-1)", f"F.softmax({a}, 1)"))
    draft.let(f"{weights} * {draft.random.choice([x, *draft.others(a)])}")


@construct(1)
def squeeze_and_excite(draft: Draft) -> None:
    x = draft.pick(4)
    channels = draft.shape(x)[1]
    mean = draft.let(f"F.adaptive_avg_pool2d({x}, 1)")
    a = draft.let(f"{draft.module('conv', f'nn.Conv2d({channels}, {channels}, 1)')}({mean})")
    draft.let(f"{x} * {draft.random.choice(('torch.sigmoid', 'F.hardsigmoid'))}({a})")


@construct(2)
def product_or_difference(draft: Draft) -> None:
    x = draft.pick(2, 3, 4)
    others = draft.others(x)
    if not others:
        raise UnsuitableError
    draft.let(f"{x} {draft.random.choice('*-+')} {draft.random.choice(others)}")


@construct(1.5)
def square(draft: Draft) -> None:
    x = draft.pick(2, 3, 4)
    draft.let(draft.random.choice((f"{x} * {x}", f"{x} * {x}", f"{x} ** 2", f"{x} + {x}")))


@construct(3)
def scalar(draft: Draft) -> None:
    x = draft.pick(2, 3, 4, 5)
    draft.let(
        draft.random.choice(
            (f"{x} * 0.5", f"{x} + 1", f"1 - {x}", f"{x} / 3.0", f"-{x}", f"{x}.clamp(-1, 1)", f"2 * {x}")
        )
    )


@construct(2)
def concatenate(draft: Draft) -> None:
    x = draft.pick(2, 3, 4)
    parts = [x, *draft.random.sample(draft.others(x), min(len(draft.others(x)), draft.random.randint(1, 2)))]
    if len(parts) == 1:
        parts.append(activate(draft, x))
    axis = draft.random.choice((1, -1))
    draft.let(f"torch.cat([{', '.join(parts)}], {axis})")


@construct(1)
def stack(draft: Draft) -> None:
    x = draft.pick(2, 3)
    others = draft.others(x) or [activate(draft, x)]
    stacked = draft.let(f"torch.stack([{x}, {draft.random.choice(others)}], {draft.random.choice((1, 2))})")
    if draft.chance(0.3):
        draft.let(f"{stacked}.sum(1)")


@construct(2)
def split_or_chunk(draft: Draft) -> None:
    x = draft.pick(2, 3, 4)
    axis = draft.random.choice((1, -1))
    length = draft.shape(x)[axis]
    a, b = draft.fresh(), draft.fresh()
    if length % 2 == 0 and draft.chance(0.5):
        draft.do(f"{a}, {b} = {x}.chunk(2, {axis})")
        draft.offer(a), draft.offer(b)
        draft.let(draft.random.choice((f"{a} * torch.sigmoid({b})", f"{b} + {a}", f"torch.cat([{b}, {a}], {axis})")))
    elif length > 2:
        draft.do(f"{a}, {b} = torch.split({x}, [{length - 1}, 1], {axis})")
        draft.offer(a), draft.offer(b)
    else:
        raise UnsuitableError


@construct(2)
def pad(draft: Draft) -> None:
    x = draft.pick(3, 4)
    axes = len(draft.shape(x)) - 2
    amounts = [draft.random.choice((0, 1, 1, 2)) for _ in range(2 * axes)]
    mode = draft.random.choice(("constant", "constant", "reflect", "replicate", "circular"))
    if draft.chance(0.3):
        kind = draft.random.choice(("Zero", "Reflection", "Replication", "Circular"))
        draft.let(f"{draft.module('pad', f'nn.{kind}Pad{axes}d(1)')}({x})")
    else:
        draft.let(f"F.pad({x}, {tuple(amounts)}, mode={mode!r})")


@construct(6)
def pool(draft: Draft) -> None:
    x = draft.pick(3, 4)
    axes = len(draft.shape(x)) - 2
    size = draft.random.choice(("1", "2", "3"))
    kind = draft.random.choice(
        (
            f"nn.MaxPool{axes}d(2)",
            f"nn.MaxPool{axes}d(3, stride=2, padding=1)",
            f"nn.MaxPool{axes}d(2, ceil_mode=True)",
            f"nn.AvgPool{axes}d(2)",
            f"nn.AvgPool{axes}d(3, stride=1, padding=1)",
            f"nn.AdaptiveAvgPool{axes}d({size})",
            f"nn.AdaptiveMaxPool{axes}d({size})",
            f"F.max_pool{axes}d({{}}, 2)",
            f"F.avg_pool{axes}d({{}}, 3, 2)",
            f"F.adaptive_avg_pool{axes}d({{}}, {size})",
        )
    )
    if draft.is_sharing and draft.chance(0.7):
        shared = draft.shared(f"pool{axes}d", f"nn.MaxPool{axes}d(2)")
        h = draft.let(f"{shared}({x})")
        if draft.chance(0.5):
            draft.let(f"{shared}({convolution(draft, h, width(draft), same=True)}({h}))")
    elif kind.startswith("F."):
        draft.let(kind.format(x))
    else:
        draft.let(f"{draft.module('pool', kind)}({x})")


@construct(3)
def norm(draft: Draft) -> None:
    x = draft.pick(2, 3, 4)
    shape = draft.shape(x)
    groups = 2 if shape[1] % 2 == 0 else 1
    kinds = [f"nn.LayerNorm({shape[-1]})", f"nn.RMSNorm({shape[-1]})", f"nn.GroupNorm({groups}, {shape[1]})"]
    kinds += [f"nn.BatchNorm{max(len(shape) - 2, 1)}d({shape[1]})"]
    draft.let(f"{draft.module('norm', draft.random.choice(kinds))}({x})")


@construct(1)
def dropout(draft: Draft) -> None:
    x = draft.pick(2, 3, 4)
    module = draft.shared("dropout", "nn.Dropout(0.1)")
    draft.let(draft.random.choice((f"{module}({x})", f"F.dropout({x}, 0.2, self.training)")))


@construct(4)
def recurrent(draft: Draft) -> None:
    x = steps(draft)
    kind = draft.random.choice(("LSTM", "GRU", "RNN"))
    options = [str(draft.shape(x)[-1]), str(draft.random.randint(2, 8))]
    batch_first = draft.chance(0.7)
    options += ["batch_first=True"] * batch_first
    if draft.shape(x)[1] < 5:
        options += ["bidirectional=True"] * draft.chance(0.4) + ["num_layers=2"] * draft.chance(0.4)
    module = draft.module(kind.lower(), f"nn.{kind}({', '.join(options)})")
    sequence = draft.fresh()
    if not batch_first:
        draft.do(f"{sequence}, _ = {module}({x}.transpose(0, 1))")
        draft.let(f"{sequence}.transpose(0, 1)")
    elif draft.chance(0.6):
        draft.do(f"{sequence}, _ = {module}({x})")
        draft.offer(sequence)
        if draft.chance(0.4):
            draft.let(f"{sequence}[:, -1]")
    else:
        state = f"(last, _) = {module}({x})" if kind == "LSTM" else f"last = {module}({x})"
        draft.do(f"{sequence}, {state}")
        draft.offer(sequence)
        draft.let("last[-1]")


@construct(2)
def cells_in_a_loop(draft: Draft) -> None:
    x = steps(draft)
    kind = draft.random.choice(("LSTM", "LSTM", "GRU", "RNN"))
    hidden = draft.random.randint(2, 6)
    cell = draft.module("cell", f"nn.{kind}Cell({draft.shape(x)[-1]}, {hidden})")
    state, memory = draft.fresh(), "memory"
    draft.do(f"{state} = {x}.new_zeros({x}.shape[0], {hidden})")
    if kind == "LSTM":
        draft.do(f"{memory} = {x}.new_zeros({x}.shape[0], {hidden})")
        step = f"{state}, {memory} = {cell}({x}[:, t], ({state}, {memory}))"
    else:
        step = f"{state} = {cell}({x}[:, t], {state})"
    draft.do(f"for t in range({x}.shape[1]):\n    {step}")
    draft.offer(state)


@construct(3)
def multihead_attention(draft: Draft) -> None:
    x = draft.pick(3)
    features = draft.shape(x)[-1]
    heads = draft.random.choice([n for n in (1, 2, 4) if features % n == 0])
    module = draft.module("attention", f"nn.MultiheadAttention({features}, {heads}, batch_first=True)")
    keys = draft.random.choice([x, x, *draft.others(x)])
    mask = ""
    if draft.chance(0.3):
        mask = f", attn_mask=torch.ones({x}.shape[1], {x}.shape[1]).triu(1).bool()"
    weights = draft.chance(0.3)
    result = draft.fresh()
    draft.do(f"{result}, _ = {module}({x}, {keys}, {keys}{mask}{'' if weights else ', need_weights=False'})")
    draft.offer(result)
    if draft.chance(0.5):
        draft.let(f"{x} + {result}")


@construct(4)
def attention_by_hand(draft: Draft) -> None:
    x = draft.pick(3)
    features, length = draft.shape(x)[-1], draft.shape(x)[1]
    q, k, v = (draft.let(f"{linear(draft, features, 8)}({x})") for _ in range(3))
    if draft.chance(0.5):
        q, k, v = (draft.let(f"{t}.reshape({t}.shape[0], {length}, 2, 4).transpose(1, 2)") for t in (q, k, v))
    if draft.chance(0.5):
        scores = draft.let(f"{q} @ {k}.transpose(-2, -1) / 2.0")
        if draft.chance(0.6):
            mask = f"torch.ones({length}, {length}).tril() == 0"
            hidden = draft.random.choice(("-1e9", "float('-inf')"))
            scores = draft.let(f"{scores}.masked_fill({mask}, {hidden})")
        weights = draft.let(f"torch.softmax({scores}, -1)")
        h = draft.let(f"torch.matmul({weights}, {v})")
    else:
        causal = draft.random.choice(("", ", is_causal=True"))
        h = draft.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{causal})")
    if len(draft.shape(h)) == 4:
        h = draft.let(f"{h}.transpose(1, 2).flatten(2)")
    h = draft.let(f"{linear(draft, 8, features)}({h})")
    if draft.chance(0.6):
        draft.let(f"{x} + {h}")


@construct(1)
def product_of_activations(draft: Draft) -> None:
    x = draft.pick(3)
    draft.let(draft.random.choice((f"{x} @ {x}.transpose(1, 2)", f"torch.bmm({x}.transpose(1, 2), {x})")))


@construct(4)
def embedding(draft: Draft) -> None:
    tokens = draft.pick(2, integers=True)
    features = width(draft)
    if draft.chance(0.15):
        mode = draft.random.choice(("mean", "sum"))
        draft.let(f"{draft.module('bag', f'nn.EmbeddingBag(10, {features}, mode={mode!r})')}({tokens})")
        return
    h = draft.let(f"{draft.module('embedding', f'nn.Embedding(10, {features})')}({tokens})")
    if draft.chance(0.4):
        positions = draft.module("positions", f"nn.Embedding(8, {features})")
        draft.let(f"{h} + {positions}(torch.arange({h}.shape[1]))")


@construct(7)
def moved(draft: Draft) -> None:
    """Elements that change only their places."""
    x = draft.pick(2, 3, 4)
    shape = draft.shape(x)
    forms = [f"{x}[:, ::2]", f"{x}[..., 1:]", f"{x}.flip(1)", f"{x}.roll(1, -1)", f"{x}[:, {[*range(shape[1])][::-1]}]"]
    if len(shape) == 2:
        forms += [f"{x}.unsqueeze(1)", f"{x}[:, :, None]"]
    else:
        forms += [f"{x}.flatten(1)", f"{x}.reshape({x}.shape[0], -1)", f"{x}.transpose(1, 2)", f"{x}[:, -1]"]
        forms += [f"{x}.transpose(-1, -2).contiguous()", f"{x}[:, :, ::2]", f"{x}.view({x}.size(0), {shape[1]}, -1)"]
    if len(shape) == 4:
        forms += 2 * [f"{x}.permute(0, 2, 3, 1)", f"{x}.flatten(2).transpose(1, 2)", f"{x}[:, :, 1:, ::2]"]
    draft.let(draft.random.choice(forms))


@construct(3)
def reduced(draft: Draft) -> None:
    x = draft.pick(3, 4)
    kind = draft.random.choice(("mean", "mean", "sum", "amax"))
    axis = draft.random.choice(("1", "-1", "(2, 3)", "(2, 3)") if len(draft.shape(x)) == 4 else ("1", "2"))
    draft.let(f"{x}.{kind}({axis}{draft.random.choice(('', '', ', keepdim=True'))})")


@construct(3)
def interpolate(draft: Draft) -> None:
    x = draft.pick(4)
    draft.let(
        draft.random.choice(
            (
                f"F.interpolate({x}, scale_factor=2, mode='nearest')",
                f"F.interpolate({x}, scale_factor=2, mode='bilinear')",
                f"F.interpolate({x}, size=(7, 9), mode='bilinear', align_corners=True)",
                f"F.interpolate({x}, size={x}.shape[-1] + 1)",
            )
        )
    )


@construct(1.5)
def flow_on_shapes(draft: Draft) -> None:
    """Python control flow that depends on a shape."""
    x = draft.pick(2, 3, 4)
    layer, h = same_shape_layer(draft, x), draft.fresh()
    condition = draft.random.choice((f"{x}.shape[-1] > 4", f"{x}.shape[1] % 2 == 0", f"{x}.dim() == 3"))
    draft.do(f"if {condition}:\n    {h} = {layer}({x})\nelse:\n    {h} = {x} * 2")
    draft.offer(h)


@construct(2)
def loop_over_modules(draft: Draft) -> None:
    x = draft.pick(2, 3, 4)
    features = draft.shape(x)[-1]
    number = draft.random.randint(2, 3)
    if draft.chance(0.5):
        layers = draft.module("layers", f"nn.ModuleList(nn.Linear({features}, {features}) for _ in range({number}))")
        h = draft.fresh()
        step = draft.random.choice(("F.relu(layer({h}))", "layer({h})", "{h} + torch.tanh(layer({h}))"))
        draft.do(f"{h} = {x}")
        draft.do(f"for layer in {layers}:\n    {h} = {step.format(h=h)}")
        draft.offer(h)
    else:
        inner = f"nn.Linear({features}, {features}), nn.ReLU(), nn.Linear({features}, {width(draft)})"
        draft.let(f"{draft.module('block', f'nn.Sequential({inner})')}({x})")


@construct(1)
def dead_call(draft: Draft) -> None:
    """A result that nothing reads: of a new layer, or of one that is called elsewhere too."""
    x = draft.pick(2, 3, 4)
    layer = same_shape_layer(draft, x)
    if draft.chance(0.6):
        draft.let(f"{layer}({x})")
    draft.do(f"unused = {layer}({x} * 2)")
