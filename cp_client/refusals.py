"""What a command that starts a cluster says when nothing can be started, and its exit status."""

import sys
from collections.abc import Callable

from cp_client.default_model import ModelFetchError
from cp_client.exit_status import FAILED, REFUSED
from cp_layout.errors import LayoutError
from cp_wire.errors import ConfigRefused
from model_files import ModelRefused


def unless_refused(start: Callable[[], int]) -> int:
    """The exit status of `start`; a refused configuration or model, or one that can't be fetched, is a sentence on stderr."""
    try:
        return start()
    except (ConfigRefused, LayoutError, ModelRefused) as refusal:
        status, sentence = REFUSED, str(refusal)
    except ModelFetchError as failure:
        status, sentence = FAILED, str(failure)
    print(f"kvloom: {sentence}", file=sys.stderr)
    return status
