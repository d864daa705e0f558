"""How a schedule is carried out. Every engine has the same functions with the same arguments."""
