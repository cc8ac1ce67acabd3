"""linattn.nn is torch.nn with a kernel: equal to torch's by weight copy, and linear where asked."""

import copy

import pytest
import torch
from torch.nn.utils import prune

import linattn
from conftest import assert_close, tokens
from linattn.nn import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer, swap

SETTINGS = {
    "plain": {},
    "sequence first": {"batch_first": False},
    "no bias": {"bias": False},
    "key and value dims": {"kdim": 12, "vdim": 10},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
}


def pair(kernel="softmax", **setting):
    setting = {"batch_first": True, **setting}
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(16, 4, **setting).double()
    ours = MultiheadAttention(16, 4, kernel=kernel, **setting).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(setting, n=9, s=9):
    q = tokens(3, n, 16, seed=1)
    k, v = tokens(3, s, setting.get("kdim", 16), seed=2), tokens(3, s, setting.get("vdim", 16), seed=3)
    return [x if setting.get("batch_first", True) else x.transpose(0, 1) for x in (q, k, v)]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_exact_multihead_attention_is_torchs(setting):
    ours, theirs = pair(**setting)
    for n, s in ((9, 9), (5, 11)):
        x = inputs(setting, n, s)
        padding = torch.zeros(3, s, dtype=torch.bool)
        padding[1, :2] = True
        for options in ({}, {"key_padding_mask": padding}, {"average_attn_weights": False}):
            for got, want in zip(ours(*x, **options), theirs(*x, **options), strict=False):
                assert_close(got, want, factor=100)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    x = inputs(setting)
    want, _ = theirs(*x, attn_mask=causal, is_causal=True)
    for options in (
        {"attn_mask": causal},
        {"attn_mask": causal, "is_causal": True},
        {"is_causal": True},
        {"attn_mask": causal == -torch.inf},
    ):
        assert_close(ours(*x, **options)[0], want, factor=100)


def test_without_a_batch():
    ours, theirs = pair()
    x = tokens(7, 16)
    for got, want in zip(ours(x, x, x), theirs(x, x, x), strict=False):
        assert_close(got, want)


@pytest.mark.parametrize("name", ["elu", "positive", "trig", "taylor"])
def test_linear_weights_are_what_the_output_was_made_with(name):
    ours, _ = pair(kernel=name)
    x = tokens(2, 20, 16)
    out, none = ours(x, x, x, is_causal=True)
    assert none is None
    out2, weights = ours(x, x, x, is_causal=True, need_weights=True, average_attn_weights=False)
    assert_close(out, out2)
    assert_close(weights.sum(-1), torch.ones(2, 4, 20, dtype=torch.float64))
    assert weights.triu(1).abs().sum() == 0


def test_streaming_a_module():
    ours, _ = pair(kernel="elu")
    x = tokens(2, 20, 16)
    whole, _ = ours(x, x, x, is_causal=True)
    first, _, state = ours(x[:, :12], x[:, :12], x[:, :12], is_causal=True, return_state=True)
    rest, _ = ours(x[:, 12:], x[:, 12:], x[:, 12:], is_causal=True, state=state)
    assert_close(torch.cat([first, rest], 1), whole)


@pytest.mark.parametrize("kernel", ["softmax", "elu"])
@pytest.mark.parametrize("setting", ["bias_kv", "zero_attn", "both"])
def test_a_stream_has_the_added_tokens_once(kernel, setting):
    module = pair(kernel, **SETTINGS[setting])[0]
    x = tokens(2, 9, 16)
    first, _, state = module(*[x[:, :4]] * 3, is_causal=True, return_state=True)
    second, weights, _ = module(*[x[:, 4:]] * 3, is_causal=True, state=state, return_state=True)
    assert_close(torch.cat([first, second], 1), module(x, x, x, is_causal=True)[0])
    assert weights is None  # they would leave out the keys before the state
    with pytest.raises(ValueError, match="would leave out the keys before it"):
        module(*[x[:, 4:]] * 3, is_causal=True, state=state, need_weights=True)


def test_state_dicts_are_torchs():
    for name in ("softmax", "elu"):
        ours, theirs = pair(kernel=name)
        assert set(ours.state_dict()) == set(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
    ours, theirs = pair(kernel="positive")
    assert set(ours.state_dict()) - set(theirs.state_dict()) == {"kernel.projection"}
    other = MultiheadAttention(16, 4, batch_first=True, kernel=linattn.kernels.Positive(4, seed=9)).double()
    other.load_state_dict(ours.state_dict())
    x = tokens(2, 6, 16)
    assert torch.equal(other(x, x, x)[0], ours(x, x, x)[0])


def test_what_has_no_linear_form_is_refused():
    ours, _ = pair(kernel="elu")
    x = tokens(2, 6, 16)
    with pytest.raises(ValueError, match=r"attn_mask of shape \(6, 6\) that is not causal has no linear form"):
        ours(x, x, x, attn_mask=torch.eye(6, dtype=torch.bool))
    with pytest.raises(ValueError, match="attn_mask adds numbers to the scores"):
        ours(x, x, x, attn_mask=torch.randn(6, 6))
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(2, 6\), got \(2, 5\)"):
        ours(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
    ours.dropout = 0.1
    with pytest.raises(ValueError, match="drops single weights, which a linear kernel never forms"):
        ours(x, x, x)
    ours.eval()(x, x, x)


def test_is_causal_hides_no_other_mask():
    ours, _ = pair()
    x = tokens(2, 10, 16)
    top_left = torch.nn.Transformer.generate_square_subsequent_mask(10, dtype=torch.float64)[:4]
    eye, all_visible = torch.eye(10, dtype=torch.bool), torch.zeros(10, 10, dtype=torch.bool)
    for query, mask in ((x[:, :4], top_left), (x, eye), (x, all_visible), (x, all_visible[:4])):
        with pytest.raises(ValueError, match=rf"attn_mask of shape \({len(mask)}, 10\) that is not causal"):
            ours(query, x, x, attn_mask=mask, is_causal=True)
    last = ours(x, x, x, is_causal=True)[0][:, -1:]
    assert_close(ours(x[:, -1:], x, x, attn_mask=all_visible[:1], is_causal=True)[0], last)
    layers = TransformerEncoderLayer(16, 4, batch_first=True), TransformerDecoderLayer(16, 4, batch_first=True)
    encoder, decoder = (layer.double() for layer in layers)
    for call in (
        lambda: encoder(x, src_mask=eye, is_causal=True),
        lambda: decoder(x, x, tgt_mask=eye, tgt_is_causal=True),
        lambda: decoder(x, x, memory_mask=eye, memory_is_causal=True),
    ):
        with pytest.raises(ValueError, match="that is not causal has no linear form"):
            call()


@pytest.mark.parametrize("training", [True, False])
def test_torchs_stacks_pass_their_masks_and_hints(training):
    torch.manual_seed(0)
    options = {"dim_feedforward": 20, "dropout": 0.0, "batch_first": True}
    theirs = torch.nn.Transformer(16, 4, 2, 2, **options).double().train(training)
    ours = swap(copy.deepcopy(theirs), kernel="softmax").train(training)
    x, mask = tokens(2, 9, 16), torch.nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    for hints in ({}, {"src_is_causal": True, "tgt_is_causal": True, "memory_is_causal": True}):
        masks = {"src_mask": mask, "tgt_mask": mask, "memory_mask": mask}
        with torch.set_grad_enabled(training):
            assert_close(ours(x, x, **masks, **hints), theirs(x, x, **masks, **hints), factor=100)


def test_a_causal_mask_and_its_hint_break_no_graph():
    torch._dynamo.reset()
    ours, _ = pair(kernel="elu")
    x, mask = tokens(2, 9, 16), torch.nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    compiled = torch.compile(
        lambda x: ours(x, x, x, attn_mask=mask, is_causal=True)[0], fullgraph=True, backend="eager"
    )
    assert_close(compiled(x), ours(x, x, x, attn_mask=mask, is_causal=True)[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_layers_are_torchs(norm_first, training):
    options = {
        "d_model": 16,
        "nhead": 4,
        "dim_feedforward": 20,
        "dropout": 0.0,
        "batch_first": True,
        "norm_first": norm_first,
    }
    x, memory = tokens(2, 9, 16, seed=1), tokens(2, 7, 16, seed=2)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    theirs = torch.nn.TransformerEncoderLayer(**options).double().train(training)
    ours = TransformerEncoderLayer(**options, kernel="softmax").double().train(training)
    ours.load_state_dict(theirs.state_dict())
    with torch.set_grad_enabled(training):
        got, want = ours(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding)
        assert_close(got[~padding], want[~padding])
        assert_close(ours(x, src_mask=mask, is_causal=True), theirs(x, src_mask=mask, is_causal=True))
    theirs = torch.nn.TransformerDecoderLayer(**options).double().train(training)
    ours = TransformerDecoderLayer(**options, kernel="softmax").double().train(training)
    ours.load_state_dict(theirs.state_dict())
    assert_close(ours(x, memory, tgt_mask=mask), theirs(x, memory, tgt_mask=mask))


def test_kernels_of_a_decoder_layer():
    layer = TransformerDecoderLayer(16, 4, batch_first=True, kernel="elu", cross_kernel="relu")
    assert type(layer.self_attn.kernel).__name__ == "Elu"
    assert type(layer.multihead_attn.kernel).__name__ == "Relu"


def encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 20, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2).double()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own fast path, which it compares with
@pytest.mark.parametrize("training", [True, False])
def test_swapping_shares_the_weights_and_keeps_the_numbers(training):
    theirs = encoder().train(training)
    ours = swap(copy.deepcopy(theirs), kernel="softmax").train(training)
    x = tokens(2, 9, 16)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    with torch.set_grad_enabled(training):
        got, want = ours(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding)
    assert_close(got[~padding], want[~padding])
    assert set(ours.state_dict()) == set(theirs.state_dict())


def test_a_swapped_kernel_is_used_in_evaluation_too():
    """torch's encoder has a fast path in evaluation that reads the weights past the module."""
    model = encoder().eval()
    x = tokens(2, 9, 16)
    with torch.no_grad():
        softmax = model(x)
        linear = swap(model, kernel="elu")(x)
    assert (softmax - linear).abs().max() > 1e-4
    assert_close(linear, model.train()(x), factor=100)


def test_swap_by_function_and_on_one_module():
    model = swap(encoder(), kernel=lambda name, module: "elu" if name.startswith("layers.1") else None)
    assert type(model.layers[0].self_attn) is torch.nn.MultiheadAttention
    assert type(model.layers[1].self_attn.kernel).__name__ == "Elu"
    single = torch.nn.MultiheadAttention(16, 4)
    assert swap(single, kernel="elu").in_proj_weight is single.in_proj_weight
    learned = swap(encoder(), kernel=linattn.kernels.Learned(4))
    assert learned.layers[0].self_attn.kernel is not learned.layers[1].self_attn.kernel
    with pytest.raises(ValueError, match=r"Linear has no torch.nn.MultiheadAttention to swap"):
        swap(torch.nn.Linear(2, 2), kernel="elu")
    with pytest.raises(ValueError, match="Positive was made for dim=64, but the tokens have dim 4"):
        swap(encoder(), kernel=linattn.kernels.Positive(64))


def test_a_swapped_model_trains():
    model = swap(encoder(), kernel="elu")
    loss = model(tokens(2, 9, 16)).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_swap_finds_a_layer_in_all_its_places():
    shared = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    model = torch.nn.ModuleDict({"first": shared, "second": shared})
    swap(model, kernel="elu")
    assert isinstance(model["first"], MultiheadAttention)
    assert model["second"] is model["first"]


def test_swap_keeps_hooks_and_buffers():
    """Pruning computes a weight from a parameter and a buffer in a hook: without it the weight would never change again."""
    model = torch.nn.Sequential(torch.nn.MultiheadAttention(16, 4, batch_first=True))
    prune.random_unstructured(model[0], "in_proj_weight", 0.5)
    seen = []
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    x, theirs = tokens(2, 5, 16, dtype=torch.float32), model[0]
    swap(model, kernel="softmax")
    with torch.no_grad():
        theirs.in_proj_weight_orig.mul_(3)
    assert_close(model[0](x, x, x)[0], theirs(x, x, x)[0])
    assert len(seen) == 2
    handle.remove()
    model[0](x, x, x)
    assert len(seen) == 2
    assert set(model[0].state_dict()) == set(theirs.state_dict())


def test_swap_refuses_attention_dropout_and_leaves_the_model_alone():
    layers = [torch.nn.MultiheadAttention(16, 4, dropout=dropout, batch_first=True) for dropout in (0.0, 0.1)]
    model = torch.nn.ModuleList(layers)
    for whole in (model, model.eval(), layers[1]):
        with pytest.raises(ValueError, match=r"attention dropout 0\.1.*set its dropout to 0\.0 before swap"):
            swap(whole, kernel="elu")
    assert all(type(layer) is torch.nn.MultiheadAttention for layer in model)
    layers[1].dropout = 0.0
    swap(model, kernel="elu")
    assert all(type(layer) is linattn.nn.MultiheadAttention for layer in model)
