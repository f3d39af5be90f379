"""What a file system may lack, such as locks, modes or a flush to the disk."""

import errno
import functools
from collections.abc import Callable

from mixer.common.ranks import rank
from mixer.common.say import say_on_stderr

# What network file systems and FUSE answer where they cannot do what is asked for.
UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


def if_supported(otherwise: str, ask: Callable, *arguments) -> bool:
    """Asks the system for what a file system may lack. Where it does, says once what follows from
    that, and returns False.
    """
    try:
        ask(*arguments)
        return True
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        if rank() == 0:
            _warn(f"warning: a file system refuses {ask.__name__} ({error.strerror}): {otherwise}")
        return False


_warn = functools.cache(say_on_stderr)  # once
