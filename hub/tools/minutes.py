"""What learns most in a few minutes of one core: variants of a calibration at equal CPU time, without labels.

    python hub/tools/minutes.py cifar100.npz hub/minutes.jsonl --minutes 4 --variants base 'only unrolled'

A variant is a list of parts (task, share of the minutes, options); a part makes as many updates as its share holds, by
the CPU time of a few that are tried first. Writes one line per variant: CPU minutes, and top-1 in percent on 2 000
training images held out, after each part with the student's own K, and at the end also with half and twice the steps.
Variants that are already in the file are not repeated.

On a machine whose speed varies, variants whose updates cost the same are compared at equal updates instead. A variant
with averaged residuals, mixed blocks or the length as an input needs a process of its own.

    python hub/tools/minutes.py cifar100.npz hub/controls.jsonl --updates 130 110 --variants 'no KL' 'nothing shared'
"""
import argparse
import copy
import json
import math
import time
from pathlib import Path

import timm
import timm.optim.muon as muon
import torch
from closed_form import merged_copy, regress

from timm_odevit import StepwiseTask, TrajectoryDistillationTask, convert_, evaluate, fit
from timm_odevit.convert.initialisation import factors
from timm_odevit.convert.measure import input_moments
from timm_odevit.data.arrays import array_loaders
from timm_odevit.data.mixup import MixupLoader
from timm_odevit.ode.steps import LieTrotterStep
from timm_odevit.ode.time_dependence import TimeField
from timm_odevit.training.budget import Stream
from timm_odevit.training.losses import trajectory_loss

RANDOM_K = (6, 6, 8, 12, 12, 16, 24)
MOMENT_IMAGES, HELD_OUT, TRIED = 256, 2000, 8
S = dict(opt='adamw', lr=3e-3)
U = dict(opt='muon', lr=1e-3, kd_weight=0.1)
N = {**U, 'kd_weight': 0.}
L = {**U, 'layerwise': True}


def begun_with(**how):
    """The parts of 'no KL', with another conversion."""
    return [('stepwise', .5, {**S, 'how': how}), ('unrolled', .5, N)]


VARIANTS = {
    'base': [('stepwise', .5, S), ('unrolled', .5, U)],
    'only stepwise': [('stepwise', 1., S)],
    'only unrolled': [('unrolled', 1., U)],
    'stepwise first quarter': [('stepwise', .25, S), ('unrolled', .75, U)],
    'stepwise three quarters': [('stepwise', .75, S), ('unrolled', .25, U)],
    'stepwise lr 1e-2': [('stepwise', .5, {**S, 'lr': 1e-2}), ('unrolled', .5, U)],
    'stepwise with Muon': [('stepwise', .5, dict(opt='muon', lr=1e-3)), ('unrolled', .5, U)],
    'unrolled lr 5e-4': [('stepwise', .5, S), ('unrolled', .5, {**U, 'lr': 5e-4})],
    'unrolled lr 2e-3': [('stepwise', .5, S), ('unrolled', .5, {**U, 'lr': 2e-3})],
    'unrolled lr 3e-3': [('stepwise', .5, S), ('unrolled', .5, {**U, 'lr': 3e-3})],
    'layerwise': [('stepwise', .5, S), ('unrolled', .5, L)],
    'layerwise 3e-3': [('stepwise', .5, S), ('unrolled', .5, {**L, 'lr': 3e-3})],
    'KL weight 1': [('stepwise', .5, S), ('unrolled', .5, {**U, 'kd_weight': 1.})],
    'no KL': [('stepwise', .5, S), ('unrolled', .5, N)],
    'no KL, lr 2e-3': [('stepwise', .5, S), ('unrolled', .5, {**N, 'lr': 2e-3})],
    'no KL, half of the tokens stepwise': [('stepwise', .5, {**S, 'tokens': .5}), ('unrolled', .5, N)],
    'no KL, layerwise': [('stepwise', .5, S), ('unrolled', .5, {**N, 'layerwise': True})],
    'no KL, random K last': [('stepwise', .5, S), ('unrolled', .3, N), ('unrolled', .2, {**N, 'steps': RANDOM_K})],
    'no KL, random K': [('stepwise', .5, S), ('unrolled', .5, {**N, 'steps': RANDOM_K})],
    'no KL, random K, averaged': [('stepwise', .5, {**S, 'averaged': True}),
                                  ('unrolled', .5, {**N, 'steps': RANDOM_K, 'averaged': True})],
    'no KL, random K, length of the step as an input': [
        ('stepwise', .5, {**S, 'how': {'rank': 23, 'by_length': True}}), ('unrolled', .5, {**N, 'steps': RANDOM_K})],
    'no KL, half of K last': [('stepwise', .5, S), ('unrolled', .3, N), ('unrolled', .2, {**N, 'steps': (6,)})],
    'no KL, half of K last, from itself': [
        ('stepwise', .5, S), ('unrolled', .3, N), ('unrolled', .2, {**N, 'steps': (6,), 'itself': True})],
    'no KL, stepwise with Muon': [('stepwise', .5, dict(opt='muon', lr=1e-3)), ('unrolled', .5, N)],
    'no KL, stepwise three quarters': [('stepwise', .75, S), ('unrolled', .25, N)],
    'no KL, only unrolled': [('unrolled', 1., N)],
    'no KL, only unrolled, half of K first': [('unrolled', .7, {**N, 'steps': (6,)}), ('unrolled', .3, N)],
    'no KL, half of K first': [('stepwise', .3, S), ('unrolled', .4, {**N, 'steps': (6,)}), ('unrolled', .3, N)],
    'KL in the last quarter': [('stepwise', .5, S), ('unrolled', .25, N), ('unrolled', .25, U)],
    'half of the tokens stepwise': [('stepwise', .5, {**S, 'tokens': .5}), ('unrolled', .5, U)],
    'half of the tokens first': [('stepwise', .5, {**S, 'tokens': .5}), ('unrolled', .25, {**U, 'tokens': .5}),
                                 ('unrolled', .25, U)],
    'quarter of the tokens stepwise': [('stepwise', .5, {**S, 'tokens': .25}), ('unrolled', .5, U)],
    'growing horizon': [('stepwise', .5, S), ('horizon', .12, {**U, 'layers': 4}), ('horizon', .18, {**U, 'layers': 8}),
                        ('unrolled', .2, U)],
    'horizon instead of stepwise': [('horizon', .25, {**U, 'layers': 4}), ('horizon', .25, {**U, 'layers': 8}),
                                    ('unrolled', .5, U)],
    'random K': [('stepwise', .5, S), ('unrolled', .5, {**U, 'steps': RANDOM_K})],
    'random K last': [('stepwise', .5, S), ('unrolled', .3, U), ('unrolled', .2, {**U, 'steps': RANDOM_K})],
    'batch 32': [('stepwise', .5, {**S, 'batch': 32}), ('unrolled', .5, {**U, 'batch': 32})],
    'batch 128': [('stepwise', .5, {**S, 'batch': 128}), ('unrolled', .5, {**U, 'batch': 128})],
    'mixup': [('stepwise', .5, S), ('unrolled', .5, {**U, 'mixup': .5})],
    'average of weights': [('stepwise', .5, S), ('unrolled', .5, {**U, 'ema_decay': .99})],
    'rank 45 then 23': [('stepwise', .3, {**S, 'how': {'rank': 45}}), ('stepwise', .2, {**S, 'how': {'rank': 23}}),
                        ('unrolled', .5, U)],
    'rank 74, 45, 23': [('stepwise', .2, {**S, 'how': {'rank': 74}}), ('stepwise', .2, {**S, 'how': {'rank': 45}}),
                        ('stepwise', .1, {**S, 'how': {'rank': 23}}), ('unrolled', .5, U)],
    # the same number of parameters, 25 % of the blocks, in other places
    'nothing shared': begun_with(rank=35, unshared=('attn.', 'mlp.')),
    'only the MLP shared': begun_with(rank=27, unshared=('attn.',)),
    'only attention shared': begun_with(rank=31, unshared=('mlp.',)),
    'two blocks, rank 11': begun_with(rank=11, phases=2),
    'three blocks': begun_with(phases=3),
    'three blocks, mixed': begun_with(time='vectors', mixed=3),
    'first and last layer kept': begun_with(blocks=(1, 10)),
    # half of the parameters
    'half: one block': begun_with(rank=59),
    'half: two blocks': begun_with(rank=47, phases=2),
    'half: three blocks': begun_with(rank=35, phases=3),
    'half: four blocks': begun_with(rank=23, phases=4),
    # a fifth, and a third
    'fifth: one block': begun_with(rank=16),
    'fifth: two blocks': begun_with(rank=4, phases=2),
    'third: one block': begun_with(rank=37),
    'third: two blocks': begun_with(rank=25, phases=2),
    # one block for all of t
    'autonomous': begun_with(),
    'autonomous, K = 24': begun_with(steps=24),
    'autonomous, MLP twice as wide': begun_with(mlp=2),
    'autonomous, K = 6': begun_with(steps=6),
    'autonomous, 10 registers': begun_with(registers=10),
    'regression only': [('regression', 1., {})],
    'regression first': [('regression', .2, {}), ('stepwise', .4, S), ('unrolled', .4, U)],
    'regression then unrolled': [('regression', .3, {}), ('unrolled', .7, U)],
}


class FewerTokens:
    """A task that trains on a random share of the patch tokens, the same ones for student and teacher."""
    share, patches = 1., 0
    kept = None

    def forward(self, input, target=None):
        if self.training and self.share < 1:
            chosen = torch.randperm(self.patches)[:round(self.share * self.patches)].sort().values
            FewerTokens.kept = torch.cat([torch.zeros(1, dtype=torch.long), 1 + chosen])
        try:
            return super().forward(input, target)
        finally:
            FewerTokens.kept = None


def keep(_, args, out):
    """A hook after the embedding."""
    return out if FewerTokens.kept is None else out[:, FewerTokens.kept]


class Registers:
    """Tokens beside those of the model, which the steps pass on: hooks of the steps, in training and evaluation.

    A step that learns on its own starts from their learned first values, for the teacher has none.
    """
    alone, states = False, None

    @classmethod
    def add(cls, student, count):
        field = student.blocks.shared
        field.registers = torch.nn.Parameter(0.02 * torch.randn(1, count, student.embed_dim))
        for step in student.blocks.solver:
            step.register_forward_pre_hook(cls.enter)
            step.register_forward_hook(cls.leave)

    @classmethod
    def enter(cls, step, args):
        first = step.field.registers.expand(len(args[0]), -1, -1)
        states = first if cls.alone or step.t < 1e-6 else cls.states
        return torch.cat([args[0], states], 1), *args[1:]

    @classmethod
    def leave(cls, step, _, out):
        tokens = out.shape[1] - step.field.registers.shape[1]
        cls.states = out[:, tokens:]
        return out[:, :tokens]


class Mixed:
    """Each layer's matrices as a mixture of a few full ones: the mean, and others with learned shares per layer.

    The others begin as the first principal components of the layers' matrices.
    """
    at = TimeField.at

    @classmethod
    def add(cls, student, original, count):
        field = student.blocks.shared
        field.others, field.shares = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for name, p in field.base.named_parameters():
            if p.ndim > 1:
                key = name.replace('.', '-')
                layers = [block.get_parameter(name.removeprefix('block.')) for block in original.blocks]
                shares, sizes, others = torch.linalg.svd(
                    torch.stack(layers).detach().flatten(1) - p.detach().flatten(), full_matrices=False)
                scale = len(layers) ** 0.5
                field.shares[key] = torch.nn.Parameter(scale * shares[:, :count - 1])
                for i in range(count - 1):  # one by one, because Muon takes matrices
                    field.others[f'{key}-{i}'] = torch.nn.Parameter((sizes[i] / scale * others[i]).view_as(p))
        TimeField.at = lambda field, t, part='': cls.mixed(field, t, part)

    @classmethod
    def mixed(cls, field, t, part):
        merged = cls.at(field, t, part)
        for name, p in field.base.named_parameters():
            key = name.replace('.', '-')
            wanted = not part or name.startswith(field.base.attention_prefixes) == (part == 'attention')
            if wanted and key in field.shares:
                shares = sum(w * field.shares[key][i] for i, w in field._knots(float(t)))
                merged[name] = p + sum(share * field.others[f'{key}-{i}'] for i, share in enumerate(shares))
        return merged


class Length:
    """The length h of the step that is being made."""
    h, advance = 1., LieTrotterStep.advance

    @classmethod
    def note(cls):
        def noted(step, x, context):
            cls.h = step.h
            return cls.advance(step, x, context)
        LieTrotterStep.advance = noted


class LengthAsInput:
    """Vectors that also depend on log h: nothing at h = 1."""
    at = TimeField.at

    @classmethod
    def add(cls, student):
        field = student.blocks.shared
        field.by_length = torch.nn.ParameterDict(
            {key: torch.nn.Parameter(torch.zeros_like(values[0])) for key, values in field.vectors.items()})
        Length.note()
        TimeField.at = lambda field, t, part='': cls.with_length(field, t, part)

    @classmethod
    def with_length(cls, field, t, part):
        merged = cls.at(field, t, part)
        for name in merged:
            key = name.replace('.', '-')
            if key in field.by_length:
                merged[name] = merged[name] + math.log(Length.h) * field.by_length[key]
        return merged


class Averaged:
    """Residuals averaged over the interval of a step, in place of those where it starts."""

    @classmethod
    def on(cls):
        Length.note()
        TimeField._knots = lambda field, t: cls.knots(field, t, Length.h)

    @classmethod
    def knots(cls, field, t, h):
        shares = [max(0., min(t + h, layer + 1) - max(t, layer)) / h for layer in field.layers]
        return [(i, share) for i, share in enumerate(shares) if share > 1e-6]


class Stepwise(FewerTokens, StepwiseTask):
    def forward(self, input, target=None):
        Registers.alone = True
        try:
            return super().forward(input, target)
        finally:
            Registers.alone = False


class Unrolled(FewerTokens, TrajectoryDistillationTask):
    pass


class Horizon(StepwiseTask):
    """The first `layers` steps unrolled; the teacher stops there too."""
    layers = 4

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        student = self.trainable_module.student
        self.trainable_module.forward = lambda images: self._states(student, images)

    def _states(self, model, images):
        found = model.forward_intermediates(
            images, indices=list(range(self.layers)), stop_early=True, norm=False, output_fmt='NLC',
            intermediates_only=True, return_prefix_tokens=True)
        return [torch.cat([prefix, patches], 1) for patches, prefix in found]

    def forward(self, input, target=None):
        with torch.no_grad():
            theirs = self._states(self.teacher, input)
        losses = [trajectory_loss(s, t, 1, True, (.45, .1, .45))
                  for s, t in zip(self.trainable_module(input), theirs, strict=True)]
        return {'loss': torch.stack(losses).mean(), 'output': theirs[-1][:, 0]}


TASKS = {'stepwise': Stepwise, 'unrolled': Unrolled, 'horizon': Horizon}


class LayerwiseMuon:
    """Muon for the factors of each layer, stored as [layers, rows, columns]; timm's own leaves them to AdamW."""

    def __init__(self, on):
        self.on, self.original = on, (muon._is_suitable_for_muon, muon.reshape_for_muon)

    def __enter__(self):
        suits, reshape = self.original
        if self.on:
            muon._is_suitable_for_muon = lambda p, *args, **kwargs: (
                ((True, 'ok') if kwargs.get('return_reason') else True) if p.ndim == 3 and min(p.shape[1:]) >= 4
                else suits(p, *args, **kwargs))
            muon.reshape_for_muon = lambda x, mode='flatten': (x, x.shape) if x.ndim == 3 else reshape(x, mode)

    def __exit__(self, *_):
        muon._is_suitable_for_muon, muon.reshape_for_muon = self.original


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data')
    parser.add_argument('out', type=Path)
    parser.add_argument('--minutes', type=float, default=4.)
    parser.add_argument('--updates', type=int, nargs='+', help='of each part, instead of minutes')
    parser.add_argument('--variants', nargs='+', choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--rank', type=int, default=23)
    parser.add_argument('--teacher', default='deit_tiny_patch16_64.cifar100')
    args = parser.parse_args()
    if args.updates:
        args.minutes = None
    torch.set_num_threads(1)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {tuple(json.loads(line)[key] for key in ('variant', 'seed', 'minutes', 'rank')) for line in lines}
    for name in args.variants:
        if (name, args.seed, args.minutes, args.rank) not in done:
            head = {'variant': name, 'seed': args.seed, 'minutes': args.minutes, 'rank': args.rank}
            record = json.dumps({**head, **run(args, name)})
            with open(args.out, 'a') as file:
                file.write(record + '\n')


def run(args, name):
    teacher = timm.create_model(args.teacher, pretrained=True).eval()
    teacher.patch_drop.register_forward_hook(keep)
    plain, val, _ = array_loaders(args.data, teacher, batch_size=64, held_out=.1, padding=0, flip=0.)
    images = plain.prepare(plain.images[:MOMENT_IMAGES])
    val.images, val.labels = val.images[:HELD_OUT], val.labels[:HELD_OUT]
    spent, parts, student = 0., [], None
    for i, (kind, share, options) in enumerate(VARIANTS[name]):
        budget = 60 * (args.minutes or 0.) * share
        options = dict(options)
        how = options.pop('how', None)
        started = time.process_time()
        if student is None or how is not None:
            student = converted(student, teacher, {'rank': args.rank} if how is None else how, images, args.seed)
        spent += time.process_time() - started  # conversion counts
        if kind == 'regression':
            started = time.process_time()
            source = loader(args, teacher, 64, 0)
            updates = regress(student, teacher, source, budget - spent)
            spent += time.process_time() - started
        else:
            updates = args.updates[i] if args.updates else None
            student, updates, seconds = train(args, kind, updates, budget, options, student, teacher)
            spent += seconds
        top1 = evaluate(student.eval(), val).results[-1].top1
        parts.append({'part': kind, 'updates': updates, 'cpu_minutes': round(spent / 60, 2), 'top1': round(top1, 2)})
        print(name, parts[-1], flush=True)
    K = student.blocks.steps
    counts = (K,) if hasattr(student.blocks.shared, 'registers') else (K, K // 2, 2 * K)  # other steps have no hooks
    own, half, twice = (*(round(r.top1, 2) for r in evaluate(student, val, steps=counts).results), None, None)[:3]
    parameters = sum(p.numel() for p in student.blocks.parameters() if p.requires_grad)
    return {'cpu_minutes': round(spent / 60, 2), 'block_parameters': parameters,
            'steps': K, 'half K': half, 'top1': own, 'twice K': twice, 'parts': parts}


def loader(args, teacher, batch, mixup):
    train = array_loaders(args.data, teacher, batch_size=batch, held_out=.1, seed=args.seed)[0]
    return MixupLoader(train, teacher.num_classes, mixup, 0., 0., .5) if mixup else train


def train(args, kind, updates, seconds, options, student, teacher):
    """Make some updates, or train for some CPU seconds; returns the student, the updates and the CPU seconds taken."""
    source = loader(args, teacher, options.pop('batch', 64), options.pop('mixup', 0))
    share, layers = options.pop('tokens', 1.), options.pop('layers', None)
    if options.pop('averaged', False):
        Averaged.on()  # for the rest of the process, and so for the measurements
    if options.pop('itself', False):
        teacher = merged_copy(student, teacher).eval()
    layerwise, ema_decay = options.pop('layerwise', False), options.pop('ema_decay', None)
    how = dict(opt=options.pop('opt'), lr=options.pop('lr'), weight_decay=0., seed=args.seed, progress=False)
    given = options if kind == 'unrolled' else {}

    def task_of(model):
        task = TASKS[kind](model, teacher, verbose=False, **given)
        task.share, task.patches = share, teacher.patch_embed.num_patches
        if layers is not None:
            task.layers = layers
        return task
    with LayerwiseMuon(layerwise):
        if updates is None:
            trial = task_of(copy.deepcopy(student))
            fit(trial, Stream(source, 3), epochs=1, **how)
            started = time.process_time()
            fit(trial, Stream(source, TRIED), epochs=1, **how)
            updates = max(1, round(seconds * TRIED / (time.process_time() - started)))
        started = time.process_time()
        task = task_of(student)
        fit(task, Stream(source, updates), epochs=1, ema_decay=ema_decay, **how)
    if ema_decay is not None:
        student = task.get_eval_model(ema=True)
    return student, updates, time.process_time() - started


def converted(student, teacher, how, images, seed):
    """A student of the teacher, or one of another rank from a student."""
    how = dict(how)
    unshared, mlp, registers = how.pop('unshared', ()), how.pop('mlp', 1), how.pop('registers', 0)
    mixed, by_length = how.pop('mixed', 0), how.pop('by_length', False)
    ranked = {'time': 'low_rank', 'init': 'svd_data'} if 'rank' in how else {}
    original = copy.deepcopy(teacher) if student is None else merged_copy(student, teacher)
    student = copy.deepcopy(original)
    torch.manual_seed(seed)
    convert_(student, **ranked, **how, images=images if ranked else None, keep_original=False)
    if unshared:
        no_longer_share(student, original, unshared, images)
    if mixed:
        Mixed.add(student, original, mixed)
    if by_length:
        LengthAsInput.add(student)
    if mlp > 1:
        widen(student.blocks.shared.block.mlp, mlp)
    if registers:
        Registers.add(student, registers)
    if not student.patch_drop._forward_hooks:
        student.patch_drop.register_forward_hook(keep)
    return student


def no_longer_share(student, original, parts, images):
    """Make the shared matrices of some parts 0 for good; those of each layer take over."""
    field, moments = student.blocks.shared, input_moments(original, list(original.blocks), images)
    with torch.no_grad():
        for name, p in field.base.named_parameters():
            key = name.replace('.', '-')
            if key in field.up and any(part in name for part in parts):
                p.zero_().requires_grad_(False)
                rank = field.up[key].shape[-1]
                for layer, block in enumerate(original.blocks):
                    value = block.get_parameter(name.removeprefix('block.'))
                    field.up[key][layer], field.down[key][layer] = factors(value, rank, moments.get((layer, name)))


def widen(mlp, times):
    """Repeat the hidden units, each with its share of the output, and a little noise to make them differ."""
    with torch.no_grad():
        for layer, dim in ((mlp.fc1, 0), (mlp.fc2, 1)):
            weight = torch.cat([layer.weight] * times, dim=dim) / (times if dim else 1)
            layer.weight = torch.nn.Parameter(weight + 0.01 * weight.std() * torch.randn_like(weight))
        mlp.fc1.bias = torch.nn.Parameter(torch.cat([mlp.fc1.bias] * times))


if __name__ == '__main__':
    main()
