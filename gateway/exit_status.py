"""How the gateway's process ends, where that says more than that it failed."""

# `EX_CONFIG` of sysexits.h: another start with the same options would end the same way.
NOT_AGAIN = 78
