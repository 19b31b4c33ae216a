"""Whose cached state and sessions a request may use."""

from expertmesh.deploy.auth.keys import ApiKey


def tenant_of(key: ApiKey | None, cache_salt: str | None = None) -> str:
    """The name that keys all hash chains of the request. Injective: no key's name has a slash.

    What is before the first slash owns the tenant's sessions, and has the quota for them. key: None
    where no keys are needed: then everybody with the same salt is one tenant.
    """
    return f"{'' if key is None else key.name}/{cache_salt or ''}"
