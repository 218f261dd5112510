"""The wire, over real sockets: a real server, a fake cell."""
