import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import numpy as np
import pytest

import timm_odevit
from timm_odevit import FitConfig, LossConfig, OdeConfig, Recipe, TrajectoryDistillationTask, fit
from timm_odevit.data.batches import DataConfig
from timm_odevit.settings import Settings, flag, integer, many, number, one_of, setting
from timm_odevit.training.recipe import Stage

KINDS = [OdeConfig, FitConfig, LossConfig, DataConfig]


@dataclass(frozen=True)
class Colour(Settings):
    """A colour.

    Attributes:
        name: Its name, one
            of two.
        depth: Its depth.
    """
    name: str = setting('red', one_of(('red', 'green')))
    depth: int | None = setting(None, integer(1, none='any'))


def paint(wall, config=None, **settings):
    return wall, Colour.from_keywords(config, settings, 'paint')


def test_settings_are_frozen_compared_by_value_and_pickled():
    colour = Colour('green', depth=2)
    assert colour == Colour('green', 2) == pickle.loads(pickle.dumps(colour)) and hash(colour) == hash(Colour('green', 2))
    assert replace(colour, depth=None) == Colour('green')
    with pytest.raises(FrozenInstanceError):
        colour.depth = 3


@pytest.mark.parametrize('kind', KINDS, ids=lambda kind: kind.__name__)
def test_every_setting_is_described(kind):
    about = kind.about()
    assert list(about) == kind.names() == [f.name for f in fields(kind)]
    assert all(text.endswith('.') and '  ' not in text for text in about.values())
    assert Colour.about() == {'name': 'Its name, one of two.', 'depth': 'Its depth.'}


def test_a_function_takes_settings_or_each_of_them():
    assert paint(1) == paint(1, config=None) == (1, Colour())
    assert paint(1, name='green') == paint(wall=1, config=Colour('green')) == (1, Colour('green'))


@pytest.mark.parametrize('call, message', [
    (lambda: paint(1, nam='red'), "paint got an unknown argument 'nam'. Did you mean 'name'? Arguments: name, depth."),
    (lambda: paint(1, config=Colour(), depth=2), "paint got both config and 'depth', which is part of it. Give only one."),
    (lambda: paint(1, config={'depth': 2}), 'config of paint must be of type Colour; got dict.'),
    (lambda: fit(1, 2), 'fit needs epochs, such as epochs=1, or minutes, such as minutes=10, but not both.'),
])
def test_a_function_refuses(call, message):
    with pytest.raises(TypeError) as e:
        call()
    assert str(e.value) == message


@pytest.mark.parametrize('check, good, bad, allowed', [
    (integer(1), [1, np.int64(3), 10 ** 400], [0, 1., True, '1', None], 'a whole number of at least 1'),
    (integer(None), [-1, 0], [0.5, None], 'a whole number'),
    (integer(2, none='all'), [None, 2], [1], 'a whole number of at least 2, or None for all'),
    (number(), [0, 1.5, np.float32(0.5), np.int64(1), 1e308], [-1, True, float('nan'), float('inf'), 10 ** 400, '1', None], 'a number of at least 0'),
    (number(open='('), [1e-9], [0], 'a number above 0'),
    (number(1.), [0, 1.], [1.01], 'a number from 0 to 1'),
    (number(1., open='()'), [0.5], [0, 1], 'a number between 0 and 1'),
    (number(1., open='('), [1], [0], 'a number above 0 and at most 1'),
    (number(1., open=')', none='none'), [0, None], [1], 'a number of at least 0 and below 1, or None for none'),
    (many(integer(1), 'layers'), [(1, 2), [3], ()], [1, 'a', None, (0,)], 'layers'),
    (flag, [True, False], [0, 1, 'True', None], 'True or False'),
])
def test_checks(check, good, bad, allowed):
    for value in good:
        assert check('x', value) == (tuple(value) if isinstance(value, list) else value)
    for value in bad:
        with pytest.raises(ValueError, match=f'^x must be {allowed}; got .{{0,63}}\\.$'):
            check('x', value)


def test_numpy_numbers_become_plain_ones():
    found = FitConfig(epochs=np.int64(2), lr=np.float32(0.5))
    assert type(found.epochs) is int and type(found.lr) is float and found == FitConfig(epochs=2, lr=0.5)


@pytest.mark.parametrize('function, given, closest', [
    (timm_odevit.convert_, (None,), 'steps'), (timm_odevit.check_convertible, (None,), 'steps'), (fit, (1, 2), 'epochs'),
    (TrajectoryDistillationTask, (1, 2), 'kd_weight')])
def test_a_wrong_setting_names_the_closest_one(function, given, closest):
    with pytest.raises(TypeError, match=f"{function.__name__} got an unknown argument '{closest}z'. Did you mean '{closest}'"):
        function(*given, **{f'{closest}z': 1})


def test_tab_completion_shows_the_public_names():
    assert dir(timm_odevit) == sorted(timm_odevit.__all__)


def test_representations_are_short():
    recipe = Recipe.load('autonomous')
    assert repr(OdeConfig(steps=6)) == 'OdeConfig(steps=6)' and repr(FitConfig(epochs=2)) == 'FitConfig(epochs=2)'
    assert eval(repr(OdeConfig(phases=2, T=3.))) == OdeConfig(phases=2, T=3.)
    assert eval(repr(recipe), {'Recipe': Recipe, 'Stage': Stage}) == recipe


# --- the settings of the ODE

@pytest.mark.parametrize('setting, message', [
    (dict(method='heun'), "Unknown method 'heun'. Did you mean 'heun2'? Allowed: euler, midpoint, heun2, rk4"),
    (dict(steps=0), 'steps must be a whole number from 1 to 10000'), (dict(steps=2.5), 'got 2.5'),
    (dict(T=0), 'T must be a number above 0, or None for the number of converted layers; got 0'),
    (dict(blocks=(2, 1)), 'blocks must be the first and the last layer'), (dict(rtol=-1), 'rtol must be'), (dict(tokens=0.), 'tokens must be'), (dict(tokens=float('nan')), 'tokens must be'),
    (dict(method='dopri5', tokens=0.5), "tokens needs fixed steps, but 'dopri5' chooses its own"),
])
def test_settings_of_the_ode_that_are_refused(setting, message):
    with pytest.raises(ValueError) as e:
        OdeConfig(**setting)
    assert message in str(e.value)
