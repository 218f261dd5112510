"""What the gateway must not forget: sessions, models and accepted commands, in one database."""
