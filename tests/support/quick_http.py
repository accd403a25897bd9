"""httpx's own functions without their cost: each call of those reads the CA bundle anew, 30 ms of a core."""

import httpx

# A connection a request, as with those: servers under test are to end without waiting for an idle client.
_CLIENT = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))

request = _CLIENT.request
stream = _CLIENT.stream
get = _CLIENT.get
post = _CLIENT.post
head = _CLIENT.head
put = _CLIENT.put
delete = _CLIENT.delete
