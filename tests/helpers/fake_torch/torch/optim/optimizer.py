"""The hooks that PyTorch has for every optimizer; nothing calls them."""


def register_optimizer_step_pre_hook(hook):
    """Forget a hook."""


def register_optimizer_step_post_hook(hook):
    """Forget a hook."""
