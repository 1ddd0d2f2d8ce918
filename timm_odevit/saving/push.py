"""push_to_hub: send a saved model to the Hugging Face Hub."""
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import HfApi
from torch import nn

from ..settings import one_line
from .cards import model_card
from .loading import CONFIG, WEIGHTS
from .save import CARD, REFERENCE, save_pretrained, save_reference

__all__ = ['push_to_hub']

# the files of a model's folder that are sent, with the recipes of earlier runs; never a pickle
_SENT = [WEIGHTS, CONFIG, CARD, REFERENCE, 'recipe.yaml', 'earlier*.yaml', 'results.json']


def push_to_hub(
        model: nn.Module | str | Path,
        repo_id: str,
        *,
        results: Sequence[Mapping[str, Any]] = (),
        dataset: str = '',
        license: str | None = None,
        private: bool | None = None,
        revision: str = 'main',
        create_pr: bool = False,
        token: str | bool | None = None,
) -> str:
    """Send a model to the Hugging Face Hub, for `timm.create_model('hf-hub:org/name', pretrained=True)` to load.

    One commit holds model.safetensors, config.json, README.md (the card) and test/tensors.safetensors (an input and the
    model's output for it); from a folder, also recipes and results.json. A card on the Hub is replaced only by that of
    a folder, or if results or license are given.

    Args:
        model: Model to send, or the folder of a saved one, which is sent as it is.
        repo_id: 'org/name'; created if it does not exist.
        results: Rows for the card, as returned by `json.loads(evaluate(...).to_json())`.
        dataset: Name of the dataset of the results, such as 'CIFAR-100'.
        license: The Hub's identifier of the licence; None for that of the weights from which the model was made.
        private: Whether a new repository is private; None for the Hub's default.
        revision: Branch to send to; created from main if it does not exist.
        create_pr: Open a pull request against the branch instead.
        token: Access token; None for the one that `hf auth login` stored.

    Returns:
        Address of the commit or of the pull request.

    Raises:
        ValueError: The model cannot be saved, its licence is not known, or the folder holds no saved model.
        OSError: The Hub refused, or could not be reached; the message is one line.

    Examples:
        >>> address = push_to_hub(student, 'org/name', private=True)
        >>> again = timm.create_model('hf-hub:org/name', pretrained=True)
    """
    with tempfile.TemporaryDirectory() as temporary:
        made_here = isinstance(model, nn.Module)
        folder = save_pretrained(model, Path(temporary) / 'model') if isinstance(model, nn.Module) else Path(model)
        if not all((folder / name).is_file() for name in (CONFIG, WEIGHTS)):
            raise ValueError(f"'{folder}' must hold {CONFIG} and {WEIGHTS}: see save_pretrained(model, folder).")
        saved: Any = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()  # raises if it cannot be loaded
        if made_here:
            card = model_card(f'hf-hub:{repo_id}', saved, results=results, dataset=dataset, license=license)
            (folder / CARD).write_text(card, encoding='utf-8')
            save_reference(saved, folder)
        elif results or dataset or license:
            raise ValueError(f'A folder is sent as it is, without results, dataset or license. Write them into '
                             f"'{folder / CARD}', or give a model.")
        api = HfApi(token=token, library_name='timm_odevit')
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            if private and not api.repo_info(repo_id).private:
                raise ValueError('it exists and is public. Make it private there, or leave out private (--private).')
            if revision != 'main':
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            keep_card = made_here and not results and not license and api.file_exists(repo_id, CARD, revision=revision)
            done = api.upload_folder(
                repo_id=repo_id, folder_path=folder, allow_patterns=_SENT, ignore_patterns=[CARD] * keep_card,
                revision=revision, create_pr=create_pr, commit_message='Model by timm-odevit')
        except Exception as e:  # which errors there are depends on the client's version
            raise OSError(f'Could not send the model to {repo_id} on the Hub: {one_line(e)}') from e
    return done.pr_url or done.commit_url
