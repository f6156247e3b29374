"""The image models in timm's registry, small: created, trained and taken apart by timm's own functions."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("timm", reason="needs timm: the extra timm")
pytest.importorskip("torchvision", reason="needs torchvision: the extra timm")

import timm
import timm.optim
import timm.scheduler
from timm.data import create_dataset, create_loader
from timm.layers import calculate_drop_path_rates, get_notrace_modules, resample_abs_pos_embed
from timm.models import group_parameters
from torch.fx import GraphModule
from torchvision.models.feature_extraction import NodePathTracer

import crate_kernels.integrations.timm
from crate_kernels import models
from crate_kernels.models._shared.base import DropPath
from tests.models.families import build, drawn
from tests.models.test_crate_alpha import clipa, tower

SMALL = {
    "crate_tiny": {"dim": 24, "heads": 3, "dim_head": 8},
    "crate_alpha_b32": {"dim": 24, "heads": 3, "dim_head": 8, "patch_size": 16},
    "crate_mae_base": {"embed_dim": 24, "num_heads": 3},
    "tost_tiny_24": {"embed_dim": 24, "num_heads": 3},
    "aot_vision_mssa": {"dim": 24, "heads": 3},
}


def small(name, seed=0, **options):
    torch.manual_seed(seed)
    return timm.create_model(name, **{"depth": 3, "img_size": 32, **SMALL[name], **options})


def images(batch=2, channels=3, size=32):
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


def test_every_image_size_is_registered():
    wanted = {
        name.replace("_encoder", "")
        for name in models.names()
        if name.startswith(("crate", "tost", "aot_vision")) and "_lm" not in name
    }
    registered = timm.list_models(module="timm")
    assert set(registered) == wanted
    assert len(wanted) == 38
    assert all(crate_kernels.integrations.timm.__dict__[name].__name__ == name for name in registered)


@pytest.mark.parametrize("name", sorted(timm.list_models(module="timm")))  # timm orders g14 and G14 by chance
def test_every_size_is_built_as_published(name):
    with torch.device("meta"):
        model = timm.create_model(name, depth=1)
        ours = models.create(name.replace("_mae_", "_mae_encoder_"), depth=1)
    assert model.config == ours.config
    cfg = model.pretrained_cfg
    assert cfg["architecture"] == name
    assert cfg["input_size"] == (3, 224, 224)
    assert cfg["num_classes"] == model.num_classes
    names = dict(model.named_parameters())
    assert f"{cfg['first_conv']}.weight" in names
    assert (f"{cfg['classifier']}.weight" in names) == (model.num_classes > 0)


@pytest.mark.parametrize("name", SMALL)
def test_create_model_with_other_inputs_and_outputs(name):
    model = small(name, num_classes=7, in_chans=1, img_size=48, global_pool="avg", drop_rate=0.25, backend="reference")
    assert (model.num_classes, model.in_chans, model.global_pool) == (7, 1, "avg")
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} >= {0.25}
    assert {m.backend for m in model.modules() if hasattr(m, "backend")} == {"reference"}
    out = model(images(channels=1, size=48))
    assert out.shape == (2, 7)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    tokens = small(name, num_classes=0, global_pool="").eval()
    assert_close(tokens(images())[:, 0], small(name, num_classes=0).eval()(images()))


@pytest.mark.parametrize("name", SMALL)
def test_a_model_is_made_on_its_device_in_its_dtype(name):
    model = small(name, device="meta", dtype=torch.bfloat16)
    assert {(t.device.type, t.dtype) for t in model.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("name", SMALL)
def test_features_of_layers(name):
    torch.manual_seed(0)
    backbone = small(name, features_only=True, out_indices=(0, -1)).eval()
    assert backbone.feature_info.channels() == [24, 24]
    assert backbone.feature_info.reduction() == [16, 16]
    maps = backbone(images())
    assert [t.shape for t in maps] == [(2, 24, 2, 2)] * 2
    assert_close(maps, small(name).eval().forward_intermediates(images(), [0, 2], intermediates_only=True))
    assert len(small(name, features_only=True)(images())) == 3
    sum(t.sum() for t in maps).backward()
    # DistributedDataParallel refuses parameters without a gradient.
    assert not [n for n, p in backbone.named_parameters() if p.grad is None and p.requires_grad]


@pytest.mark.parametrize("name", SMALL)
def test_the_learning_rate_decays_by_layer(name):
    model = small(name, num_classes=5)
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    after = 2 if name.startswith("tost") else 0
    assert set(layers.values()) == set(range(1 + 3 + after + 1))  # stem, layers, ToST's class attention, head
    assert layers[f"{model.layout.stem}.weight"] == 0
    assert layers[f"{model.layout.blocks}.2." + next(iter(model._blocks()[2].state_dict()))] == 3
    assert layers[f"{model.layout.norm}.weight"] == 3 + after
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1.0, layer_decay=0.5)
    scales = {group["lr_scale"] for group in optimizer.param_groups}
    assert scales == {0.5**k for k in range(5 + after)}
    plain = {id(p) for g in optimizer.param_groups if g["weight_decay"] == 0 for p in g["params"]}
    assert {id(model.get_parameter(n)) for n in model.no_weight_decay()} <= plain


@pytest.mark.parametrize("name", SMALL)
def test_another_input_size_is_as_timm_resizes_positions(name):
    """timm resamples with antialiasing: the option of ours."""
    fixed = small(name).layout.fixed_size
    options = {} if name.startswith("tost") else {"antialias": True}
    model = drawn(small(name, **options)).eval()
    dynamic = drawn(small(name, dynamic_img_size=True, **options)).eval()
    place, img = model.layout.positions, torch.randn(2, 3, 48, 64)
    positions = getattr(model, place).detach().clone() if place else None
    if fixed:
        with pytest.raises(ValueError, match="img must have 32x32 pixels"):
            model(img)
    model.set_input_size((48, 64))
    if positions is not None:
        wanted = resample_abs_pos_embed(positions, new_size=[3, 4], old_size=[2, 2], num_prefix_tokens=1)
        assert_close(getattr(model, place).detach(), wanted)
    assert_close(model(img), dynamic(img))
    backbone = small(name, features_only=True, out_indices=(1,), dynamic_img_size=True)
    assert [tuple(each.shape) for each in backbone(img)] == [(2, 24, 3, 4)]


@pytest.mark.parametrize("name", [name for name in SMALL if not name.startswith("tost")])  # its rate is constant
def test_layers_skip_at_the_rates_of_timm(name):
    model = small(name, drop_path_rate=0.3)
    blocks = [[m.rate for m in block.modules() if isinstance(m, DropPath)] for block in model._blocks()]
    assert_close([max(rates) for rates in blocks], calculate_drop_path_rates(0.3, 3))
    model(images()).sum().backward()


@pytest.mark.parametrize("name", SMALL)
def test_checkpointing_changes_no_gradient(name):
    grads = []
    for enable in (False, True):
        model = small(name)
        model.set_grad_checkpointing(enable)
        model(images()).square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    assert_close(*grads)


FILES = {
    "same": {},
    "classes": {"num_classes": 3},
    "size": {"img_size": 48},
    "gray": {"in_chans": 1, "num_classes": 0},
    "more-channels": {"in_chans": 6},
}


@pytest.mark.parametrize("changes", FILES.values(), ids=FILES)
@pytest.mark.parametrize("name", SMALL)
def test_weights_of_a_file_fit_another_input(name, changes, tmp_path):
    source = drawn(small(name, num_classes=5)).eval()
    source.save_pretrained(tmp_path)
    overlay = {"file": str(tmp_path / "model.safetensors"), "input_size": (3, 32, 32), "num_classes": 5}
    options = {"num_classes": 5, **changes}
    model = small(name, seed=9, pretrained=True, pretrained_cfg_overlay=overlay, **options).eval()
    assert (model.num_classes, model.in_chans) == (options["num_classes"], options.get("in_chans", 3))
    size, channels = options.get("img_size", 32), model.in_chans
    gray = images(channels=1, size=size)
    wide = gray.expand(-1, 3, -1, -1)
    assert model(gray.expand(-1, channels, -1, -1)).shape[0] == 2
    if size == 32:
        # In float64: what layers make of a rounding is not what is asked.
        source, model, gray, wide = source.double(), model.double(), gray.double(), wide.double()
        wanted, found = (m.forward_features(g) for m, g in ((source, wide), (model, gray.expand(-1, channels, -1, -1))))
        assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        if model.num_classes == 5:
            assert_close(model(gray.expand(-1, channels, -1, -1)), source(wide), rtol=1e-5, atol=1e-6)
    else:
        moved = [n for n, t in source.state_dict().items() if t.shape != model.state_dict()[n].shape]
        assert moved == [n for n in ("pos_embedding", "pos_embed") if n in source.state_dict()]
        if name == "crate_tiny":  # constant positions stay so when resized
            assert not model.state_dict()["pos_embedding"].allclose(small(name, 9, img_size=48).pos_embedding)


def test_the_encoder_of_a_whole_checkpoint(tmp_path):
    whole = drawn(build("crate_mae", img_size=32, patch_size=16)).eval()
    torch.save({"model": whole.state_dict()}, tmp_path / "checkpoint.pth")
    overlay = {"file": str(tmp_path / "checkpoint.pth"), "input_size": (3, 32, 32)}
    model = small("crate_mae_base", depth=2, num_classes=4, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    assert_close(model.forward_features(images()), whole.forward_features(images()))
    assert model(images()).shape == (2, 4)


EPS = {"implied": ({}, 1e-6), "passed": ({"head_eps": 1e-3}, 1e-3)}


@pytest.mark.parametrize(("changes", "eps"), EPS.values(), ids=EPS)
def test_a_clipa_checkpoint_has_its_own_eps(changes, eps, tmp_path):
    """As from_official gives it: the weights say that they are of CLIPA, not what its norm adds."""
    source = tower()
    torch.save({"state_dict": clipa(source)}, tmp_path / "checkpoint.pth")
    overlay = {"file": str(tmp_path / "checkpoint.pth"), "input_size": (3, 8, 8), "num_classes": 5}
    options = {"pretrained": True, "pretrained_cfg_overlay": overlay, "num_classes": 5}
    model = small("crate_alpha_b32", depth=2, img_size=8, patch_size=4, **options, **changes).double().eval()
    assert model.config.head_eps == model.mlp_head[0].eps == eps
    assert model.transformer.layers[0][0].norm.eps == 1e-6
    if not changes:
        assert torch.equal(model(images(size=8).double()), source(images(size=8).double()))
    published = small("crate_alpha_b32", depth=2, img_size=8, patch_size=4, num_classes=5)
    published.save_pretrained(tmp_path)
    overlay["file"] = str(tmp_path / "model.safetensors")
    assert small("crate_alpha_b32", depth=2, img_size=8, patch_size=4, **options).mlp_head[0].eps == 1e-5


BAD = {
    "pool": ({"global_pool": "map"}, ValueError, "crate_tiny: global_pool must be 'token', 'avg' or '', got 'map'"),
    "unknown": ({"init_values": 0.1}, TypeError, "crate_tiny: arguments must be timm's or among dim, .*, got init"),
    "near": ({"lmbda": 0.1}, TypeError, "crate_tiny: arguments must be .*, got lmbda; did you mean lambd"),
    "size": ({"img_size": 33}, ValueError, "CRATE: image_size must be a multiple of patch_size, got 33x33 by 16x16"),
    "no-weights": ({"pretrained": True}, RuntimeError, "No pretrained weights exist for crate_tiny"),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        small("crate_tiny", **options)


@pytest.mark.parametrize("name", SMALL)
def test_a_traced_model_computes_the_same(name):
    model = small(name).eval()
    tracer = NodePathTracer(leaf_modules=get_notrace_modules(), param_shapes_constant=True)
    traced = GraphModule(model, tracer.trace(model))
    assert_close(traced(images()), model(images()))
    with pytest.raises(ValueError, match="img must"):
        traced(images(channels=2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", SMALL)
def test_a_script_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script cannot take it; use torch\.compile"):
        torch.jit.script(small(name))


def test_a_backbone_compiles_in_one_graph():
    backbone = small("crate_tiny", depth=1, features_only=True, out_indices=(0,))
    compiled = torch.compile(backbone, fullgraph=True, backend="eager")
    assert_close(compiled(images()), backbone(images()))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Two kinds of digits as files, a folder a class."""
    image = pytest.importorskip("PIL.Image", reason="needs pillow: pip install pillow")
    data = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn: the extra demo").load_digits(n_class=2)
    root = tmp_path_factory.mktemp("digits")
    for index, (pixels, label) in enumerate(zip(data.images, data.target, strict=True)):
        folder = root / ("train" if index % 4 else "validation") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray((pixels * 15.9).astype("uint8")).save(folder / f"{index}.png")
    return root


def loader(root, split, cfg):
    dataset = create_dataset("", root=str(root / split))
    assert len(dataset.reader.class_to_idx) == 2
    return create_loader(
        dataset,
        input_size=cfg["input_size"],
        batch_size=30,
        is_training=split == "train",
        no_aug=True,
        use_prefetcher=False,
        num_workers=0,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        persistent_workers=False,
        pin_memory=False,
        device=torch.device("cpu"),
    )


# timm leaves it to the garbage collector to close its image files.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize(
    ("name", "options"), [("crate_tiny", {}), ("tost_tiny_24", {"eta": 1.0})], ids=["crate", "tost"]
)
def test_timm_trains_one_on_a_folder_of_digits(name, options, digits):
    model = small(name, depth=2, num_classes=2, img_size=16, patch_size=8, **options)
    cfg = {"input_size": (3, 16, 16)}
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=5e-3, weight_decay=0.05, layer_decay=0.9)
    schedule, epochs = timm.scheduler.create_scheduler_v2(optimizer, sched="cosine", num_epochs=3, min_lr=1e-4)
    rates = []
    for epoch in range(epochs):
        for img, label in loader(digits, "train", cfg):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(img), label).backward()
            optimizer.step()
        schedule.step(epoch + 1)
        rates.append(max(group["lr"] for group in optimizer.param_groups))
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 5e-3
    model.eval()
    with torch.no_grad():
        right = [(model(img).argmax(1) == label).float() for img, label in loader(digits, "validation", cfg)]
    assert torch.cat(right).mean() > 0.9
