"""Internet addresses that images may come from."""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_NOT_PUBLIC = tuple(
    ip_network(each)
    for each in (
        "192.0.0.0/24",  # protocol assignments; metadata of Oracle's cloud
        "192.88.99.0/24",  # former relays of 6to4
        "168.63.129.16/32",  # agent of Azure's virtual machines
        "3fff::/20",  # documentation
    )
)
"""Networks that `ipaddress` calls global."""


def is_public(text: str) -> bool:
    """Return whether an address belongs to a host of the public internet, and to one only.

    An IPv6 address that stands for an IPv4 address is as public as that.
    """
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        if (inner := _inner(address)) is not None:
            address = inner
        elif address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast and not any(address in each for each in _NOT_PUBLIC)


def _inner(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address within a mapped, 6to4 or NAT64 address."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
