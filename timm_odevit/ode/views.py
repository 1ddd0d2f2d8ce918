"""Views of a model: shallow copies of its modules, since another thread may be running the model, too."""
from functools import partial
from types import MethodType
from typing import Any

from .fields import Module


def shallow_copy(module: Module) -> Module:
    """A module of the same class with the same settings, hooks and tensors, but submodules that can be replaced."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.update(_rebound(module, module, twin))
    if 'forward' in module.__dict__ and twin.__dict__['forward'] is module.__dict__['forward']:
        raise RuntimeError(f'The forward of this {type(module).__name__} was replaced by a function, which may hold '
                           'other weights. Use a method, a partial that takes the module, or a hook.')
    twin.__dict__['_compiled_call_impl'] = None  # module.compile() ties it to the original module
    twin.__dict__['_modules'] = module.__dict__['_modules'].copy()
    return twin


def view(module: Any, twins: dict[Any, Any]) -> Any:
    """A shallow copy of a module in which some modules are replaced by twins; the module itself if it has none."""
    if module in twins:
        return twins[module]
    children = {name: view(child, twins) for name, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    copied = shallow_copy(module)
    copied._modules.update(children)
    for original, twin in twins.items():
        twin.__dict__.update(_rebound(twin, module, copied))
        if module.__dict__.get('feature_info') is original.feature_info:
            copied.feature_info = twin.feature_info
    for name, child in children.items():  # some are bound to their host, such as RoPE, which makes a table per step
        if child is module._modules[name] and (bound := _rebound(child, module, copied)):
            copied._modules[name] = shallow_copy(child)
            copied._modules[name].__dict__.update(bound)
    return copied


def _rebound(owner: Any, module: Any, twin: Any) -> dict[str, Any]:
    """The attributes of an owner that are methods of a module, or partials that take it, for the module's twin."""
    bound: dict[str, Any] = {}
    for name, value in owner.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            bound[name] = MethodType(value.__func__, twin)
        elif isinstance(value, partial) and any(arg is module for arg in value.args):
            args = [twin if arg is module else arg for arg in value.args]
            bound[name] = partial(value.func, *args, **value.keywords)
    return bound
