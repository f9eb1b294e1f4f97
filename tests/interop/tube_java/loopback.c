/* Apache's servers listen on every interface and have no setting for that. Loaded before them (LD_PRELOAD), this lets
   them listen on loopback only: a bind to the wildcard address binds 127.0.0.1. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <stddef.h>
#include <sys/socket.h>

typedef int (*bind_function)(int, const struct sockaddr *, socklen_t);

int bind(int socket, const struct sockaddr *address, socklen_t size) {
    bind_function next = (bind_function)dlsym(RTLD_NEXT, "bind");
    if (address != NULL && address->sa_family == AF_INET && size >= sizeof(struct sockaddr_in)) {
        struct sockaddr_in local = *(const struct sockaddr_in *)address;
        if (local.sin_addr.s_addr == htonl(INADDR_ANY)) {
            local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            return next(socket, (const struct sockaddr *)&local, sizeof local);
        }
    }
    return next(socket, address, size);
}
