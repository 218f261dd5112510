"""What a cell obeys and answers: messages, error kinds, frames. Neither torch nor a web framework is imported here."""
