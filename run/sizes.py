"""What a configuration asks of memory, estimated from below before any of it is taken. A size with a few zeros too many is refused with
its flag; whether a run just fits is not told by this."""

from __future__ import annotations

from classifiers import HEADS
from config import Config
from inputs.memory import Room, require_room
from inputs.rows import Data
from utils import whole_numbers

FLOAT = 4  # bytes
DEFAULT_EMBEDDING = 256


def check_sizes(config: Config, data: Data, shape: tuple[int, ...]) -> None:
    """`shape`: of one row as the model reads it. Rows that are ready, and the bank, are not counted: they are no larger than the data."""
    rooms = [*of_model(config, data, shape), *of_neighbors(config, data), *of_results(config, data)]
    require_room(*(room for room in rooms if room.size > 0))


def of_model(config: Config, data: Data, shape: tuple[int, ...]) -> list[Room]:
    options, training = config.model, config.training
    batch = min(training.batch_size, max(len(data.train), 1))
    side = shape[1] if len(shape) == 3 else 0
    rooms = [Room("resize", config.data.resize, f"a batch of {batch} images of {side} x {side}", FLOAT * batch * shape[0] * side**2)]
    # Weights, and in training their gradients and what the optimizer keeps.
    copies = FLOAT * (1 if options.freeze_backbone else 3 if training.optimizer == "sgd" else 4)
    if options.model.startswith("timm/"):
        return [*rooms, *of_timm(config, shape, batch, copies)]
    if options.model not in ("vit", "mlp"):
        return rooms
    depth, width, inner = options.num_layers, options.d_hidden, options.d_mlp
    tokens = (side // options.patch_size) ** 2 + 1 if side else 1
    attention = 4 * width**2 if options.model == "vit" else 0
    seen = 1 if options.freeze_backbone else depth  # layers whose activations are there at one time
    activations = 2.0 * FLOAT * batch * tokens * width * seen
    rooms += [
        Room("d_hidden", width, f"a model of width {width:,}", float(copies) * depth * attention + activations),
        Room("d_mlp", inner, f"a model with {inner:,} numbers inside its MLPs", 2.0 * copies * depth * width * inner),
    ]
    most = max(range(len(rooms)), key=lambda i: rooms[i].size)
    if most and depth > 1000:  # few models are so deep: it is depth that makes the width large
        rooms[most] = Room("num_layers", depth, f"a model of {depth:,} blocks", rooms[most].size)
    if tokens > 100_000:
        rooms.append(Room("patch_size", options.patch_size, f"attention among {tokens:,} tokens", FLOAT * batch * tokens * width))
    return rooms


def of_timm(config: Config, shape: tuple[int, ...], batch: int, copies: int) -> list[Room]:
    from models.backbones import timm_size  # late: timm takes its time

    name = config.model.model
    parameters, seen = timm_size(name, shape)
    trained = [] if config.model.freeze_backbone else [Room("batch_size", batch, f"a batch in the blocks of {name}", FLOAT * batch * seen)]
    return [Room("model", name, f"a model of {parameters:,} parameters", float(copies) * parameters), *trained]


def of_results(config: Config, data: Data) -> list[Room]:
    """What is counted of validation or test rows, whichever are more, and features of a frozen backbone, which are all there at once."""
    classes, options, test, val = data.num_classes, config.model, len(data.test), len(data.val) if data.val else 0
    option, value = ("val_fraction", config.data.val_fraction) if val > test else ("dataset", config.data.dataset)
    table = f"a table of the scores of {max(test, val):,} {'validation' if val > test else 'test'} rows among {classes:,} classes"
    rooms = [Room(option, value, table, FLOAT * 4.0 * classes * max(test, val))]  # probabilities in double precision, and their logarithms
    if options.freeze_backbone and config.data.augment and options.model in ("vit", "mlp"):
        views, trained = config.head.views, len(data.train)
        rooms.append(Room("views", views, f"an array of {views:,} views of {trained:,} rows", FLOAT * views * trained * options.d_hidden))
    return rooms


def of_neighbors(config: Config, data: Data) -> list[Room]:
    options = config.head
    if not HEADS[options.head].wants_bank:
        return []
    features = config.model.d_hidden
    size = features if options.embed_dim == 0 else options.embed_dim or DEFAULT_EMBEDDING
    batch = min(config.training.batch_size, max(len(data.train), 1))
    asked = {name: max(whole_numbers(name, getattr(config.evaluation, name)), default=0) for name in ("k_eval", "k_ensemble")}
    rooms = [Room(name, k, f"a search for {k:,} neighbors", FLOAT * k * size) for name, k in asked.items()]
    k, of_batch = options.k_train, f"a batch of {batch} rows with {options.k_train:,} neighbors each"
    return [
        *rooms,
        Room("k_train", k, of_batch, FLOAT * batch * k * size),
        Room("embed_dim", options.embed_dim, f"a projection to {size:,} numbers", 4.0 * FLOAT * size * (features + size)),
    ]
