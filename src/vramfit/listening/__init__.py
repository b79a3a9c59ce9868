"""What both servers stand on: the socket, the connections to it and their limits, the log, and an orderly stop."""
