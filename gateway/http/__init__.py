"""The wire: bodies, keys, status codes, long polls. The wire's own words (`seq_id`, `save_weights`) live only here."""
