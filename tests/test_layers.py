"""Norms and feed-forward layers against torch's kernels, numpy loops, transformers' modules and numbers on paper."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tinylm.layers import GELUFeedForward, LayerNorm, RMSNorm, SwiGLUFeedForward, at_least_float32, unit_rms

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NORMS = [LayerNorm, RMSNorm]
FEED_FORWARDS = [GELUFeedForward, SwiGLUFeedForward]


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomize(module, seed=0):
    "Every parameter random, in its own dtype: gains away from 1, biases away from 0."
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def torch_norm(norm, x):
    "The same norm by torch's kernel."
    if isinstance(norm, RMSNorm):
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def torch_feed_forward(layer, x):
    "The same layer from torch's functions, gate rows first."
    if isinstance(layer, GELUFeedForward):
        return F.linear(F.gelu(F.linear(x, layer.up_proj.weight, layer.up_proj.bias), approximate="tanh"),
                        layer.down_proj.weight, layer.down_proj.bias)
    W, b = layer.gate_up_proj.weight, layer.gate_up_proj.bias
    width = len(W) // 2
    gate = F.silu(F.linear(x, W[:width], None if b is None else b[:width]))
    value = F.linear(x, W[width:], None if b is None else b[width:])
    return F.linear(gate * value, layer.down_proj.weight, layer.down_proj.bias)


def values_and_gradients(function, module, x):
    x = x.clone().requires_grad_()
    y = function(x)
    weights = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)  # an uneven downstream gradient
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])]


def assert_same_values_and_gradients(module, reference, x, atol):
    ours = values_and_gradients(module, module, x)
    theirs = values_and_gradients(lambda x: reference(module, x), module, x)
    assert len(ours) == len(theirs) >= 3
    for mine, right in zip(ours, theirs):
        torch.testing.assert_close(mine, right, rtol=0, atol=atol)


# ---------------------------------------------------------------------------------------------- norms against references


@pytest.mark.parametrize("shape", [(8,), (1, 1, 1), (3, 1, 7), (2, 5, 4), (2, 3, 4, 6), (1, 768)])
@pytest.mark.parametrize("eps", [1e-8, 1e-5, 1e-2])
@pytest.mark.parametrize("make", [LayerNorm, lambda dim, eps: LayerNorm(dim, eps, bias=False), RMSNorm],
                         ids=["LayerNorm", "LayerNorm without bias", "RMSNorm"])
def test_norms_equal_torch_in_float64_with_gradients(make, shape, eps):
    norm = randomize(make(shape[-1], eps).double())
    ours = values_and_gradients(norm, norm, random(*shape, seed=1))
    theirs = values_and_gradients(lambda x: torch_norm(norm, x), norm, random(*shape, seed=1))
    for mine, right in zip(ours, theirs):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_equal_torch_in_float32(norm):
    module = randomize(norm(33))
    assert_same_values_and_gradients(module, torch_norm, random(4, 5, 33, dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("scale, shift", [(1.0, 0.0), (1e-3, 0.0), (1e3, 5.0), (1.0, 100.0)])
def test_norms_equal_a_numpy_loop_over_rows(scale, shift):
    x = random(6, 9) * scale + shift
    layer_norm, rms_norm = randomize(LayerNorm(9).double(), 1), randomize(RMSNorm(9).double(), 2)
    for row, by_layer, by_rms in zip(x.numpy(), layer_norm(x).detach().numpy(), rms_norm(x).detach().numpy()):
        mean = sum(row) / 9
        spread = math.sqrt(sum((number - mean) ** 2 for number in row) / 9 + 1e-5)
        size = math.sqrt(sum(number**2 for number in row) / 9 + 1e-5)
        for i in range(9):
            expected = (row[i] - mean) / spread * layer_norm.weight[i].item() + layer_norm.bias[i].item()
            assert by_layer[i] == pytest.approx(expected, rel=1e-10, abs=1e-12)
            assert by_rms[i] == pytest.approx(row[i] / size * rms_norm.weight[i].item(), rel=1e-12, abs=1e-12)


def test_rmsnorm_by_hand():
    row = torch.tensor([1.0, 2, 2, 4], dtype=torch.float64)
    for factor in (1, 10, -3):
        expected = torch.tensor([0.4, 0.8, 0.8, 1.6], dtype=torch.float64) * math.copysign(1, factor)
        torch.testing.assert_close(RMSNorm(4, eps=1e-14).double()(factor * row).detach(), expected, rtol=0, atol=1e-8)
    kite = torch.tensor([9.0, 1, 0, 0, 0, -4, 0, 12], dtype=torch.float64)  # root mean square 11/2
    expected = torch.tensor([18.0, 2, 0, 0, 0, -8, 0, 24]).double() / 11
    torch.testing.assert_close(RMSNorm(8, eps=1e-12).double()(kite).detach(), expected, rtol=0, atol=1e-12)


def test_layernorm_by_hand():
    row = torch.tensor([2.0, 4, 4, 4, 5, 5, 7, 9], dtype=torch.float64)
    expected = torch.tensor([-1.5, -0.5, -0.5, -0.5, 0, 0, 1, 2], dtype=torch.float64)
    torch.testing.assert_close(LayerNorm(8, eps=1e-12).double()(row).detach(), expected, rtol=0, atol=1e-10)


def test_layernorm_variance_is_biased():
    right = torch.tensor([1.7320, -0.5773, -0.5773, -0.5773])  # with C − 1: 1.5, −0.5, −0.5, −0.5
    torch.testing.assert_close(LayerNorm(4)(torch.tensor([1.0, 0, 0, 0])).detach(), right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_eps_stands_inside_the_root(norm):
    y = norm(2, eps=1e-5).double()(torch.tensor([1e-3, -1e-3], dtype=torch.float64)).detach()  # outside the root: ±0.99010
    torch.testing.assert_close(y, torch.tensor([0.3015113, -0.3015113]).double(), rtol=0, atol=1e-7)


def test_unit_variance_means_the_biased_variance():
    "Control: a check with x.std() as it comes calls a right LayerNorm wrong."
    y = LayerNorm(4, eps=1e-12).double()(random(50, 4)).detach()
    torch.testing.assert_close(y.std(dim=-1, correction=0), torch.ones(50).double(), rtol=0, atol=1e-8)
    torch.testing.assert_close(y.std(dim=-1), torch.full((50,), math.sqrt(4 / 3), dtype=torch.float64), rtol=0, atol=1e-8)
    torch.testing.assert_close(y.mean(dim=-1), torch.zeros(50).double(), rtol=0, atol=1e-12)


def test_rmsnorm_has_unit_mean_square_and_keeps_the_mean():
    x = random(50, 6) + 3
    y = RMSNorm(6, eps=1e-12).double()(x).detach()
    torch.testing.assert_close(y.square().mean(dim=-1), torch.ones(50).double(), rtol=0, atol=1e-10)
    assert (y.mean(dim=-1) > 0.5).all()


@pytest.mark.parametrize("norm, shift", [(LayerNorm, 0.0), (LayerNorm, 7.0), (RMSNorm, 0.0)])
def test_what_each_norm_forgets(norm, shift):
    x = random(20, 8)
    module = randomize(norm(8, eps=1e-14).double())
    torch.testing.assert_close(module(13 * x + shift), module(x), rtol=0, atol=1e-10)


def test_rmsnorm_does_not_forget_the_mean():
    x = random(20, 8)
    assert (RMSNorm(8).double()(x + 7) - RMSNorm(8).double()(x)).abs().max() > 0.5


def test_llama_rmsnorm_with_copied_gain():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours = randomize(RMSNorm(24, eps=1e-6))
    theirs = LlamaRMSNorm(24, eps=1e-6)
    theirs.load_state_dict(ours.state_dict())
    x = random(3, 5, 24, dtype=torch.float32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    x = x.bfloat16()  # theirs rounds before the gain as well, ours once at the end: at most one more rounding
    torch.testing.assert_close(ours.bfloat16()(x), theirs.bfloat16()(x), rtol=2**-7, atol=0)


# ---------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("gain", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_norm_output_dtype_is_input_dtype(norm, dtype, gain):
    y = norm(8).to(gain)(random(3, 8, dtype=dtype))
    assert y.dtype == dtype and torch.isfinite(y).all()


@pytest.mark.parametrize("norm", NORMS)
def test_float64_is_never_narrowed(norm):
    x = torch.tensor([1.0, 1.0 + 1e-9, 1.0 - 1e-9, 2.0], dtype=torch.float64)
    module = norm(4).double()
    torch.testing.assert_close(module(x), torch_norm(module, x), rtol=0, atol=1e-14)
    assert at_least_float32(x) is x


def test_rmsnorm_does_not_square_in_float16():
    y = RMSNorm(4)(torch.tensor([300.0, 0, 0, 0], dtype=torch.float16))  # 300² is inf in float16
    assert y.dtype == torch.float16 and y.tolist() == [2, 0, 0, 0]


def test_layernorm_does_not_square_in_float16():
    y = LayerNorm(4)(torch.tensor([600.0, 0, 0, 0], dtype=torch.float16))
    assert y.tolist() == pytest.approx([1.7320, -0.5773, -0.5773, -0.5773], abs=1e-3)


@pytest.mark.parametrize("dtype, half_step", [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 400.0])
def test_half_precision_is_the_float32_truth_rounded_once(norm, dtype, half_step, scale):
    x = (random(64, 96) * scale).to(dtype)
    module = randomize(norm(96)).to(dtype)
    truth = torch_norm(module.float(), x.float())
    y = module.to(dtype)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), truth, rtol=half_step * 1.01, atol=1e-6)


def test_gain_and_bias_are_applied_before_the_cast():
    x = random(64, 32, dtype=torch.bfloat16)
    module = randomize(LayerNorm(32))  # float32 gain and bias
    rounded_once = torch_norm(module, x.float()).bfloat16()
    assert (module(x) == rounded_once).float().mean() > 0.99  # a cast before the gain changes about one element in five


@pytest.mark.parametrize("norm", NORMS)
def test_wide_sums_do_not_stall_in_bfloat16(norm):
    x = torch.ones(4096, dtype=torch.bfloat16)
    x[::2] = -1  # mean 0, mean square 1
    assert torch.equal(norm(4096)(x), x)


def test_unit_rms_and_at_least_float32():
    assert [at_least_float32(torch.ones(1, dtype=dtype)).dtype for dtype in DTYPES] == [torch.float32] * 3 + [torch.float64]
    torch.testing.assert_close(unit_rms(torch.tensor([[3.0, 4.0], [0, 0]]), 1e-12), torch.tensor([[3.0, 4.0], [0, 0]]) / math.sqrt(12.5))


# -------------------------------------------------------------------------------------------------------- rows and limits


@pytest.mark.parametrize("make", [LayerNorm, RMSNorm, lambda C: GELUFeedForward(C, 16), lambda C: SwiGLUFeedForward(C, 16)],
                         ids=["LayerNorm", "RMSNorm", "GELUFeedForward", "SwiGLUFeedForward"])
def test_rows_do_not_mix(make):
    layer = randomize(make(8).double())
    x = random(2, 5, 8)
    changed = x.clone()
    changed[1, 3] = 1e6 * random(8, seed=1)
    same = (layer(x) == layer(changed)).all(dim=-1)
    assert same.sum() == 9 and not same[1, 3]
    one_by_one = torch.stack([layer(row) for row in x.reshape(10, 8)]).reshape(2, 5, 8)
    torch.testing.assert_close(layer(x), one_by_one, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.train()(x), layer.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_and_constant_rows_stay_finite_with_finite_gradients(dtype):
    for module, row in ((RMSNorm(4), 0.0), (LayerNorm(4), 0.0), (LayerNorm(4), 3.0)):
        x = torch.full((4,), row, dtype=dtype, requires_grad=True)
        y = module(x)
        y.sum().backward()
        assert y.tolist() == [0, 0, 0, 0]
        assert torch.isfinite(x.grad).all() and torch.isfinite(module.weight.grad).all()


def test_constant_row_gives_the_bias():
    norm = randomize(LayerNorm(4))
    torch.testing.assert_close(norm(torch.full((4,), 3.0)), norm.bias, rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_eps_bounds_how_far_a_whisper_is_amplified(norm):
    "1/√eps is the largest factor; a larger eps makes a smaller output."
    tiny = torch.tensor([1e-9, -1e-9], dtype=torch.float64)
    sizes = [norm(2, eps).double()(tiny)[0].item() for eps in (1e-12, 1e-6, 1e-2)]
    assert sizes == pytest.approx([1e-9 / math.sqrt(eps + 1e-18) for eps in (1e-12, 1e-6, 1e-2)], rel=1e-9)


@pytest.mark.parametrize("module, width", [(LayerNorm(5), 5), (LayerNorm(5, bias=False), 5), (RMSNorm(5), 5), (GELUFeedForward(3, 4, bias=True), 3),
                                           (SwiGLUFeedForward(3, 4, bias=True), 3), (SwiGLUFeedForward(3, 4), 3)], ids=lambda v: type(v).__name__)
def test_gradients_by_finite_differences(module, width):
    module = randomize(module.double())
    parameters = tuple(parameter.detach().clone().requires_grad_() for parameter in module.parameters())
    names = [name for name, _ in module.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters)), (x,))

    assert torch.autograd.gradcheck(function, (random(2, width).requires_grad_(), *parameters))


@pytest.mark.parametrize("module", [LayerNorm(6), RMSNorm(6), GELUFeedForward(6, 8, bias=True), SwiGLUFeedForward(6, 8, bias=True)],
                         ids=lambda module: type(module).__name__)
def test_every_parameter_gets_a_gradient(module):
    module(random(4, 6, dtype=torch.float32)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("norm", NORMS)
def test_no_gradient_along_the_row_itself(norm):
    "What does not change the output has no gradient: making a row longer."
    x = random(7, 8).requires_grad_()
    (norm(8, eps=1e-14).double()(x) * random(7, 8, seed=1)).sum().backward()
    assert (x.grad * x).sum(dim=-1).abs().max() < 1e-10 < x.grad.abs().min()


# ----------------------------------------------------------------------------------------------------------- feed-forward


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape, d_ff", [((8,), 32), ((1, 1, 1), 1), ((2, 3, 5), 7), ((2, 2, 3, 4), 6)])
@pytest.mark.parametrize("feed_forward", FEED_FORWARDS)
def test_feed_forward_equals_torch_in_float64_with_gradients(feed_forward, shape, d_ff, bias):
    layer = randomize(feed_forward(shape[-1], d_ff, bias).double())
    ours = values_and_gradients(layer, layer, random(*shape, seed=1))
    theirs = values_and_gradients(lambda x: torch_feed_forward(layer, x), layer, random(*shape, seed=1))
    for mine, right in zip(ours, theirs):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("feed_forward", FEED_FORWARDS)
def test_feed_forward_equals_torch_in_float32(feed_forward):
    layer = feed_forward(16, 48)
    assert_same_values_and_gradients(layer, torch_feed_forward, random(2, 3, 16, dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("feed_forward", FEED_FORWARDS)
@pytest.mark.parametrize("dtype, steps", [(torch.float16, 2**-9), (torch.bfloat16, 2**-6)], ids=str)
def test_feed_forward_in_half_precision(feed_forward, dtype, steps):
    layer = feed_forward(32, 64).to(dtype)
    x = random(8, 32, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    truth = torch_feed_forward(layer.float(), x.float())
    assert (y.float() - truth).abs().max() < steps * truth.abs().max()


def test_feed_forward_equals_a_numpy_loop():
    x = random(5, 3).numpy()
    gelu, swiglu = randomize(GELUFeedForward(3, 4, bias=True).double(), 1), randomize(SwiGLUFeedForward(3, 4, bias=True).double(), 2)
    up, up_bias, down, down_bias = (p.detach().numpy() for p in gelu.parameters())
    gate_up, gate_up_bias, gated_down, gated_down_bias = (p.detach().numpy() for p in swiglu.parameters())
    for row, by_gelu, by_swiglu in zip(x, gelu(torch.from_numpy(x)).detach().numpy(), swiglu(torch.from_numpy(x)).detach().numpy()):
        units, gated = [], []
        for f in range(4):
            z = np.dot(up[f], row) + up_bias[f]
            units.append(0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))))
            gate, value = np.dot(gate_up[f], row) + gate_up_bias[f], np.dot(gate_up[4 + f], row) + gate_up_bias[4 + f]
            gated.append(gate / (1 + math.exp(-gate)) * value)
        np.testing.assert_allclose(by_gelu, down @ units + down_bias, rtol=0, atol=1e-12)
        np.testing.assert_allclose(by_swiglu, gated_down @ gated + gated_down_bias, rtol=0, atol=1e-12)


def test_gpt2_mlp_with_copied_weights():
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Config

    theirs = GPT2MLP(64, GPT2Config(n_embd=16, resid_pdrop=0.0)).double().eval()
    ours = randomize(GELUFeedForward(16, 64, bias=True).double())
    with torch.no_grad():  # theirs stores matrices transposed
        theirs.c_fc.weight.copy_(ours.up_proj.weight.T)
        theirs.c_fc.bias.copy_(ours.up_proj.bias)
        theirs.c_proj.weight.copy_(ours.down_proj.weight.T)
        theirs.c_proj.bias.copy_(ours.down_proj.bias)
    x = random(2, 5, 16)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_llama_mlp_with_copied_weights():
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    theirs = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=2)).double()
    ours = randomize(SwiGLUFeedForward(16, 40).double())
    with torch.no_grad():
        theirs.gate_proj.weight.copy_(ours.gate_up_proj.weight[:40])
        theirs.up_proj.weight.copy_(ours.gate_up_proj.weight[40:])
        theirs.down_proj.weight.copy_(ours.down_proj.weight)
    x = random(2, 5, 16)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


def one_unit(layer, first, second=None):
    "Weights 1: the first row reads slot 0, the second row (if there is one) slot 1, the result is written to slot 0."
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.down_proj.weight[0, 0] = 1
        matrix = layer.up_proj if second is None else layer.gate_up_proj
        matrix.weight[0, 0] = 1
        if second is not None:
            matrix.weight[1, 1] = 1
        word = torch.tensor([first, 0.0 if second is None else second], dtype=torch.float64)
        return layer.double()(word)[0].item()


@pytest.mark.parametrize("z", [-8.0, -3.0, -1.0, -0.1, 0.0, 0.5, 1.0, 2.7, 8.0])
def test_gelu_is_the_tanh_form_and_not_erf(z):
    y = one_unit(GELUFeedForward(2, 1), z)
    tanh_form = z * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    assert y == pytest.approx(tanh_form, abs=1e-14)
    assert y == pytest.approx(z * 0.5 * (1 + math.erf(z / math.sqrt(2))), abs=5e-4)
    assert y - one_unit(GELUFeedForward(2, 1), -z) == pytest.approx(z, abs=1e-12)
    if z == -3.0:  # where the two forms stand furthest apart one can tell them
        assert abs(y - z * 0.5 * (1 + math.erf(z / math.sqrt(2)))) > 2e-4


def test_gate_rows_come_first_then_values():
    assert one_unit(SwiGLUFeedForward(2, 1), 3.0, 5.0) == pytest.approx(15 / (1 + math.exp(-3)), abs=1e-12)  # swapped: 14.9
    assert one_unit(SwiGLUFeedForward(2, 1), -3.0, 5.0) == pytest.approx(-15 / (1 + math.exp(3)), abs=1e-12)


def multiplier():
    layer = SwiGLUFeedForward(2, 2).double()
    with torch.no_grad():
        layer.gate_up_proj.weight.copy_(torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]]))
        layer.down_proj.weight.copy_(torch.tensor([[1, 1], [0, 0]]))
    return layer


def test_two_swiglu_units_multiply_exactly():
    assert multiplier()(torch.tensor([3.0, 5.0]).double()).tolist() == pytest.approx([15, 0], abs=1e-14)
    ab = 10 * random(1000, 2)
    torch.testing.assert_close(multiplier()(ab)[:, 0], ab[:, 0] * ab[:, 1], rtol=1e-13, atol=1e-13)


def test_kite_feed_forward_says_a_thing_comes_next():
    "The hand-set layer of the running example: slot 0 receives 2·(colour² − thing²) of the normed row, here 8."
    layer = SwiGLUFeedForward(8, 4).double()
    reads = torch.zeros(4, 8)
    reads[0, 1], reads[1, 1], reads[2, 2], reads[3, 2] = 9, -9, 9, -9
    with torch.no_grad():
        layer.gate_up_proj.weight.copy_(torch.cat((reads, reads)))
        layer.down_proj.weight.zero_()
        layer.down_proj.weight[0] = torch.tensor([2.0, 2, -2, -2])
    row = torch.tensor([1.0, 1, 0, 0, 0, -4, 0, 12]).double()  # root mean square 9/2
    after = row + layer(RMSNorm(8, eps=1e-12).double()(row))
    torch.testing.assert_close(after.detach(), torch.tensor([9.0, 1, 0, 0, 0, -4, 0, 12]).double(), rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------- names, shapes, counts, inputs


def shapes(module):
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def test_parameter_names_and_shapes():
    assert shapes(LayerNorm(6)) == {"weight": (6,), "bias": (6,)}
    assert shapes(LayerNorm(6, bias=False)) == shapes(RMSNorm(6)) == {"weight": (6,)}
    assert LayerNorm(6, bias=False).bias is None
    assert shapes(GELUFeedForward(6, 24)) == {"up_proj.weight": (24, 6), "down_proj.weight": (6, 24)}
    assert shapes(GELUFeedForward(6, 24, bias=True)) == {"up_proj.weight": (24, 6), "up_proj.bias": (24,),
                                                         "down_proj.weight": (6, 24), "down_proj.bias": (6,)}
    assert shapes(SwiGLUFeedForward(6, 16)) == {"gate_up_proj.weight": (32, 6), "down_proj.weight": (6, 16)}
    assert shapes(SwiGLUFeedForward(6, 16, bias=True)) == {"gate_up_proj.weight": (32, 6), "gate_up_proj.bias": (32,),
                                                           "down_proj.weight": (6, 16), "down_proj.bias": (6,)}


def test_norms_start_at_gain_one_and_bias_zero():
    for norm in (LayerNorm(5), RMSNorm(5)):
        assert norm.weight.tolist() == [1] * 5 and norm.eps == 1e-5
    assert LayerNorm(5).bias.tolist() == [0] * 5


def test_parameter_counts_of_the_base_model():
    assert sum(p.numel() for p in SwiGLUFeedForward(256, 704).parameters()) == 540_672
    assert sum(p.numel() for p in GELUFeedForward(256, 1024).parameters()) == 524_288


@pytest.mark.parametrize("eps", [0.0, -1e-5, math.nan, math.inf])
@pytest.mark.parametrize("norm", NORMS)
def test_eps_must_be_positive(norm, eps):
    with pytest.raises(ValueError, match=r"eps=.* must be above 0"):
        norm(4, eps)


@pytest.mark.parametrize("width", [0, -3])
def test_widths_must_be_positive(width):
    for make, name in ((LayerNorm, "dim"), (RMSNorm, "dim"), (lambda w: GELUFeedForward(w, 4), "d_model"), (lambda w: GELUFeedForward(4, w), "d_ff"),
                       (lambda w: SwiGLUFeedForward(w, 4), "d_model"), (lambda w: SwiGLUFeedForward(4, w), "d_ff")):
        with pytest.raises(ValueError, match=f"{name}={width} must be at least 1"):
            make(width)
        with pytest.raises(TypeError, match=rf"{name}=8\.5 must be a whole number"):
            make(8.5)


LAYERS = [LayerNorm(4), RMSNorm(4), GELUFeedForward(4, 8), SwiGLUFeedForward(4, 8)]


@pytest.mark.parametrize("shape", [(2, 1), (2, 5), (4, 3), ()])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_another_width_is_refused_and_not_broadcast(layer, shape):
    with pytest.raises(ValueError, match="last dimension must be 4"):
        layer(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_integers_are_refused_and_not_truncated(layer, dtype):
    with pytest.raises(TypeError, match=f"floating-point numbers, not {dtype}"):
        layer(torch.ones(2, 4, dtype=dtype))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_an_empty_batch_stays_empty_and_nan_stays_in_its_row(layer):
    assert layer(torch.ones(0, 3, 4)).shape == (0, 3, 4)
    x = random(3, 4, dtype=torch.float32)
    x[1, 2] = math.nan
    assert torch.isnan(layer(x)).any(dim=-1).tolist() == [False, True, False]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 17), st.integers(1, 9), st.booleans(), st.integers(0, 2**16))
def test_any_shape_equals_torch(batch, C, width, bias, seed):
    x = random(*batch, C, seed=seed)
    for norm in (LayerNorm(C, bias=bias), RMSNorm(C)):
        norm = randomize(norm.double(), seed)
        torch.testing.assert_close(norm(x), torch_norm(norm, x), rtol=1e-11, atol=1e-11)
    for feed_forward in FEED_FORWARDS:
        layer = randomize(feed_forward(C, width, bias).double(), seed)
        assert layer(x).shape == x.shape
        torch.testing.assert_close(layer(x), torch_feed_forward(layer, x), rtol=1e-11, atol=1e-11)
