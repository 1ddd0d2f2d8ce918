import dataclasses

import pytest

from timm_odevit import OdeConfig
from timm_odevit.ode.config import adaptive_methods
from timm_odevit.ode.methods import METHODS


def test_is_frozen_and_round_trips_through_model_args():
    config = OdeConfig(field='lipschitz', method='dopri5', steps=4, T=3, init='spectral', rtol=1e-2, adjoint=True)
    assert OdeConfig.from_args(config.to_args(), 'odevit_small') == config
    assert all(name.startswith('ode_') for name in config.to_args())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3


def test_resolve_takes_steps_and_T_from_the_depth():
    assert (OdeConfig().resolve(7).steps, OdeConfig().resolve(7).T) == (7, 7.)
    assert OdeConfig(steps=3, T=2.).resolve(7) == OdeConfig(steps=3, T=2.)


@pytest.mark.parametrize('method', [*METHODS, *adaptive_methods()])
def test_takes_every_method(method):
    assert OdeConfig(method=method).adaptive == (method not in METHODS)


@pytest.mark.parametrize('setting, message', [
    (dict(method='heun'), "Unknown method 'heun'. Did you mean 'heun2'? Allowed: euler, midpoint, heun2, rk4"),
    (dict(field='lipshitz'), "Unknown field 'lipshitz'. Did you mean 'lipschitz'? Allowed: lipschitz, native."),
    (dict(init='median'), "Unknown init 'median'. Did you mean 'mean'? Allowed: mean, spectral, svd, svd_data"),
    (dict(steps=0), 'steps must be a whole number of at least 1'),
    (dict(steps=2.5), 'got 2.5'),
    (dict(steps=True), 'got True'),
    (dict(T=0), 'T must be a number above 0, or None for the number of converted layers; got 0'),
    (dict(T=float('inf')), 'got inf'),
    (dict(rtol=-1), 'rtol must be'),
    (dict(atol='x'), "got 'x'"),
    (dict(adjoint=1, method='dopri5'), 'adjoint must be True or False'),
    (dict(adjoint=True), 'adjoint needs an adaptive method'),
])
def test_refuses(setting, message):
    with pytest.raises(ValueError) as e:
        OdeConfig(**setting)
    assert message in str(e.value)
