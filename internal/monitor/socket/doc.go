// Package socket is the unix socket that a monitor answers on: a name that is
// taken over from a dead predecessor and given again when it is lost, and the
// watch for what may mean that a monitor answers or has died. What is said on
// it others know.
package socket
