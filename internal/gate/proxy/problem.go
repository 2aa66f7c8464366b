package proxy

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/gate/proxy/prior"
)

// problem is why a request got no answer from a machine, in words for the
// person who sent it.
type problem struct {
	Status int
	// Title is a few words.
	Title string
	// Detail says what and which, in one line.
	Detail string
	// Remedy is one command line; empty where there is none.
	Remedy string
	// Hint says what the remedy does.
	Hint string
}

// problemHeader carries the kind of failure, for programs; its presence also
// tells the proxy's own answers from those of a machine.
const problemHeader = "Holdpoint-Error"

func connectProblem() problem {
	return problem{
		Status: http.StatusMethodNotAllowed,
		Title:  "Not a forward proxy",
		Detail: "holdpoint carries requests to published machines only; CONNECT is not served",
	}
}

func lookupProblem(host string, port int, err error) problem {
	if !errdefs.Is(err, errdefs.NotFound) {
		return problem{
			Status: http.StatusServiceUnavailable,
			Title:  "Routes cannot be read",
			Detail: fmt.Sprintf("holdpoint cannot look up %s: %v", quoteHost(host), err),
			Remedy: "holdpoint routes",
			Hint:   "Look at the routes with",
		}
	}
	return problem{
		Status: http.StatusNotFound,
		Title:  "Not published",
		Detail: fmt.Sprintf("no machine is published as %s on port %d", quoteHost(host), port),
		Remedy: "holdpoint expose MACHINE PORT --host " + remedyHost(host),
		Hint:   "Publish one with",
	}
}

func crowdProblem(limit int) problem {
	return problem{
		Status: http.StatusServiceUnavailable,
		Title:  "Too many clients",
		Detail: fmt.Sprintf("%d connections to published routes are in use, which is the limit; try again when some have ended", limit),
	}
}

// upstreamProblem explains err, which came of connecting to rt's target or of
// sending the request there.
func upstreamProblem(rt *route, err error) problem {
	t := rt.target
	var dial *dialError
	if !errors.As(err, &dial) {
		return answerProblem(rt, err)
	}
	t = dial.target
	leads := fmt.Sprintf("%s leads to port %d of machine %s", rt.host, t.Port, t.Machine)
	if errors.Is(dial.err, errFull) {
		return problem{
			Status: http.StatusServiceUnavailable,
			Title:  "Too many connections",
			Detail: leads + ", which has as many connections through its routes as it may; try again when some have ended",
			Remedy: "holdpoint logs " + t.Machine + " --route " + rt.host,
			Hint:   "See what came with",
		}
	}
	switch errdefs.KindOf(dial.err) {
	case errdefs.WrongState, errdefs.Denied, errdefs.Conflict:
		why, remedy := reasonOf(dial.err)
		return problem{
			Status: http.StatusBadGateway,
			Title:  "The machine cannot be reached",
			Detail: fmt.Sprintf("%s, which cannot be reached: %s", leads, why),
			Remedy: remedy,
			Hint:   "Run",
		}
	case errdefs.MachineBusy:
		return problem{
			Status: http.StatusServiceUnavailable,
			Title:  "The machine is busy",
			Detail: fmt.Sprintf("%s, which is busy: %v", leads, dial.err),
			Remedy: "holdpoint operation ls",
			Hint:   "See what it is doing with",
		}
	case errdefs.Deadline:
		return problem{
			Status: http.StatusGatewayTimeout,
			Title:  "The machine did not answer in time",
			Detail: fmt.Sprintf("%s, which did not answer within %s", leads, dialTimeout),
			Remedy: "holdpoint inspect " + t.Machine,
			Hint:   "See its state with",
		}
	}
	why := ""
	if !errdefs.Is(dial.err, errdefs.NotFound) { // which is how the guest says no more than this
		why = ": " + dial.err.Error()
	}
	return problem{
		Status: http.StatusBadGateway,
		Title:  "Nothing answers on this port",
		Detail: leads + ", where nothing answers" + why,
		Remedy: "holdpoint expose " + t.Machine + " PORT --host " + rt.host,
		Hint:   "Start the server in the machine, or move the route with",
	}
}

// answerProblem explains err, which came of a server that was reached.
func answerProblem(rt *route, err error) problem {
	t := rt.target
	if errors.Is(err, prior.ErrNotHTTP2) {
		return problem{
			Status: http.StatusBadGateway,
			Title:  "Not a server of HTTP/2",
			Detail: fmt.Sprintf("%s leads to port %d of machine %s, which gRPC needs HTTP/2 on: %v", rt.host, t.Port, t.Machine, err),
			Remedy: "holdpoint exec " + t.Machine + " -- ss -ltnp",
			Hint:   "See what listens there with",
		}
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return problem{
			Status: http.StatusGatewayTimeout,
			Title:  "No answer in time",
			Detail: fmt.Sprintf("the server on port %d of machine %s took the request for %s and has not begun to answer in time", t.Port, t.Machine, rt.host),
			Remedy: "holdpoint exec " + t.Machine + " -- ss -ltnp",
			Hint:   "See what listens there with",
		}
	}
	return problem{
		Status: http.StatusBadGateway,
		Title:  "No answer from the machine",
		Detail: fmt.Sprintf("the server on port %d of machine %s took the request for %s and ended without an HTTP answer: %v",
			t.Port, t.Machine, rt.host, err),
		Remedy: "holdpoint exec " + t.Machine + " -- ss -ltnp",
		Hint:   "See what listens there with",
	}
}

// reasonOf parts a refusal into why, without the daemon's own name of the door,
// and the command that it proposes at its end; "" where it proposes none.
func reasonOf(err error) (why, remedy string) {
	why = strings.TrimPrefix(err.Error(), "expose: ")
	if before, command, found := strings.Cut(why, "; run holdpoint "); found {
		return before, "holdpoint " + command
	}
	return why, ""
}

// line is the problem as one line of text.
func (p problem) line() string {
	s := "holdpoint: " + p.Detail
	if p.Remedy != "" {
		s += "; " + strings.ToLower(p.Hint[:1]) + p.Hint[1:] + ": " + p.Remedy
	}
	return strings.NewReplacer("\r", " ", "\n", " ").Replace(s) + "\n"
}

// writeProblem answers with a page for browsers and with one line for all
// others.
func (p *Proxy) writeProblem(w http.ResponseWriter, r *http.Request, pr problem) {
	h := w.Header()
	if v, ok := w.(*visit); ok {
		v.note = pr.Title
	}
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set(problemHeader, strings.ToLower(strings.ReplaceAll(pr.Title, " ", "-")))
	if isGRPC(r) {
		writeGRPC(w, pr)
		return
	}
	if pr.Status == http.StatusServiceUnavailable {
		h.Set("Retry-After", "1")
	}
	if !strings.Contains(r.Header.Get("Accept"), "text/html") {
		h.Set("Content-Type", "text/plain; charset=utf-8")
		line := pr.line()
		h.Set("Content-Length", strconv.Itoa(len(line)))
		w.WriteHeader(pr.Status)
		p.sent(w.Write([]byte(line)))
		return
	}
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
	w.WriteHeader(pr.Status)
	p.sent(0, p.page.Execute(w, pr))
}

// sent notes an answer that its client did not take.
func (p *Proxy) sent(_ int, err error) {
	if err != nil {
		p.log.Debug("send error page", "error", err)
	}
}

// quoteHost makes a host name of any client fit for one line.
func quoteHost(host string) string {
	if host == "" {
		return "an empty host name"
	}
	if remedyHost(host) == host {
		return host
	}
	return strconv.QuoteToASCII(host)
}

// remedyHost is host where it may be published, and a placeholder elsewhere:
// a command that a page proposes never carries foreign text.
func remedyHost(host string) string {
	legal := len(host) <= 253 && strings.HasSuffix(host, ".localhost") && !strings.HasPrefix(host, "-")
	for _, c := range host {
		if c != '.' && c != '-' && (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			legal = false
		}
	}
	if !legal {
		return "NAME.localhost"
	}
	return host
}

const pageHTML = `<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{.Title}} – holdpoint</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 42rem; margin: 4rem auto; padding: 0 1rem; color: #222; background: #fff }
h1 { font-size: 1.4rem }
code { display: inline-block; background: #eee; padding: .3rem .6rem; border-radius: .3rem; overflow-wrap: anywhere }
footer { margin-top: 3rem; color: #777; font-size: .85rem }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } code { background: #2a2a2a } }
</style>
</head>
<body>
<h1>{{.Status}}: {{.Title}}</h1>
<p>{{.Detail}}.</p>
{{if .Remedy}}<p>{{.Hint}}<br><code>{{.Remedy}}</code></p>{{end}}
<footer>This page is from the holdpoint proxy, not from the machine.</footer>
</body>
</html>
`
