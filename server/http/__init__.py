"""HTTP without models: listening, HTTP/1.1 and HTTP/2, clients and what each may hold, errors as answers."""
