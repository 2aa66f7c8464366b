package proxy

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// place is where a target's connections go in a test.
type place struct {
	id         string
	generation uint64
	port       int
}

// world is a Backend of listeners in this process.
type world struct {
	mu     sync.Mutex
	routes map[string]Target
	addrs  map[place]string
	errs   map[place]error
	dials  map[place]int
	// onDial, when not nil, is called at the start of each Dial.
	onDial func(Target)
}

func newWorld() *world {
	return &world{
		routes: make(map[string]Target), addrs: make(map[place]string),
		errs: make(map[place]error), dials: make(map[place]int),
	}
}

func at(t Target) place { return place{t.MachineID, t.Generation, t.Port} }

func (w *world) Lookup(_ context.Context, host string) (Target, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t, ok := w.routes[host]
	if !ok {
		return Target{}, errdefs.New(errdefs.NotFound, "route %q: not published", host)
	}
	return t, nil
}

func (w *world) Dial(ctx context.Context, t Target) (net.Conn, error) {
	w.mu.Lock()
	on := w.onDial
	w.mu.Unlock()
	if on != nil {
		on(t)
	}
	w.mu.Lock()
	w.dials[at(t)]++
	addr, err := w.addrs[at(t)], w.errs[at(t)]
	w.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if addr == "" {
		return nil, fmt.Errorf("dial port %d: connection refused", t.Port)
	}
	return new(net.Dialer).DialContext(ctx, "tcp", addr)
}

// publish makes host lead to t, and t's connections go to addr.
func (w *world) publish(host string, t Target, addr string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.routes[host] = t
	if addr != "" {
		w.addrs[at(t)] = addr
	}
}

func (w *world) fail(t Target, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.errs[at(t)] = err
}

func (w *world) dialCount(t Target) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dials[at(t)]
}

// serveHTTP runs a server of a guest until the test ends.
func serveHTTP(t testing.TB, h http.HandlerFunc) string {
	t.Helper()
	l := listenTCP(t)
	s := &http.Server{Handler: h, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() {
		_ = s.Close()
		<-done
	})
	return l.Addr().String()
}

// serveTCP runs handle for each connection until the test ends.
func serveTCP(t testing.TB, handle func(net.Conn)) string {
	t.Helper()
	l := listenTCP(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer func() { _ = c.Close() }()
				handle(c)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return l.Addr().String()
}

func listenTCP(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// fixture is a running proxy and a client of it.
type fixture struct {
	*world
	proxy  *Proxy
	client *http.Client
}

func start(t testing.TB, change ...func(*Config)) *fixture {
	t.Helper()
	w := newWorld()
	cfg := Config{Backend: w, Port: freePort(t), Logger: slog.New(slog.DiscardHandler)}
	for _, c := range change {
		c(&cfg)
	}
	p, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", p.Addr())
		},
		DisableCompression:  true,
		MaxIdleConnsPerHost: 64,
	}
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return &fixture{world: w, proxy: p, client: &http.Client{Transport: tr}}
}

// freePort is a port that was free a moment ago, so that tests of several
// packages at once do not meet at the default one.
func freePort(t testing.TB) int {
	l := listenTCP(t)
	defer func() { _ = l.Close() }()
	return portOf(l)
}

// get sends a request and returns the status and the body.
func (f *fixture) get(t testing.TB, method, host, accept string, body io.Reader) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest(method, "http://"+f.proxy.Addr()+"/some//path?q=1;2", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = host
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

func web() Target {
	return Target{MachineID: "00000000000000aa", Generation: 1, Port: 8080, Machine: "web"}
}

func say(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }
}

func TestHostNamesAreNormalized(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveHTTP(t, say("hello")))
	for _, host := range []string{"app.localhost", "APP.LocalHost", "app.localhost.", "app.localhost:7780", "App.localhost.:1"} {
		if resp, body := f.get(t, "GET", host, "", nil); resp.StatusCode != 200 || body != "hello" {
			t.Errorf("Host %q: %d %q", host, resp.StatusCode, body)
		}
	}
}

func TestRequestIsPassedOnAsSent(t *testing.T) {
	f := start(t)
	seen := make(chan *http.Request, 1)
	f.publish("app.localhost", web(), serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Keep-Alive", "timeout=5")
		w.Header().Set("X-Answer", "yes")
		seen <- r
	}))
	req, _ := http.NewRequest("GET", "http://"+f.proxy.Addr()+"//a%2Fb/../c?x=1;y=%zz", nil)
	req.Host = "app.localhost:7780"
	req.Header.Set("X-Forwarded-For", "8.8.8.8")
	req.Header.Set("Forwarded", "for=8.8.8.8")
	req.Header.Set("X-Forwarded-Port", "443")
	req.Header.Set("X-Real-IP", "8.8.8.8")
	req.Header.Set("Connection", "X-Hop")
	req.Header.Set("X-Hop", "1")
	req.Header.Set("Accept-Encoding", "br")
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	got := <-seen
	for what, pair := range map[string][2]string{
		"request target":    {got.RequestURI, "//a%2Fb/../c?x=1;y=%zz"},
		"Host":              {got.Host, "app.localhost:7780"},
		"X-Forwarded-For":   {got.Header.Get("X-Forwarded-For"), "127.0.0.1"},
		"X-Forwarded-Host":  {got.Header.Get("X-Forwarded-Host"), "app.localhost:7780"},
		"X-Forwarded-Proto": {got.Header.Get("X-Forwarded-Proto"), "http"},
		"Forwarded":         {got.Header.Get("Forwarded"), `for=127.0.0.1;host="app.localhost:7780";proto=http`},
		"X-Forwarded-Port":  {got.Header.Get("X-Forwarded-Port"), ""},
		"X-Real-Ip":         {got.Header.Get("X-Real-Ip"), ""},
		"X-Hop":             {got.Header.Get("X-Hop"), ""},
		"Accept-Encoding":   {got.Header.Get("Accept-Encoding"), "br"},
		"answer":            {resp.Header.Get("X-Answer"), "yes"},
		"answer Keep-Alive": {resp.Header.Get("Keep-Alive"), ""},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: got %q, want %q", what, pair[0], pair[1])
		}
	}
}

// TestClientsDoNotSayWhoTheyAre: CGI and its like read all of these names as
// those that the proxy sets or removes.
func TestClientsDoNotSayWhoTheyAre(t *testing.T) {
	f := start(t)
	seen := make(chan http.Header, 1)
	f.publish("app.localhost", web(), serveHTTP(t, func(_ http.ResponseWriter, r *http.Request) { seen <- r.Header }))
	req, _ := http.NewRequest("GET", "http://"+f.proxy.Addr(), nil)
	req.Host = "app.localhost"
	req.Header["X_Other"] = []string{"kept"}
	for _, name := range []string{
		"X-Forwarded-For", "X_Forwarded_For", "X-Forwarded_for", "x_forwarded-host", "X.Forwarded.Proto", "X_FORWARDED_PORT",
		"X_Real_Ip", "X-Real_IP", "FORWARDED", "forwarded",
	} {
		req.Header[name] = []string{"8.8.8.8"}
	}
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	got := <-seen
	for name, values := range got {
		if slices.Contains(values, "8.8.8.8") {
			t.Errorf("%s passed the proxy", name)
		}
	}
	if got.Get("X-Forwarded-For") != "127.0.0.1" || got.Get("X_other") != "kept" {
		t.Errorf("the server sees %v", got)
	}
}

func TestUnknownHost(t *testing.T) {
	f := start(t)
	resp, body := f.get(t, "GET", "nobody.localhost:1", "*/*", nil)
	want := fmt.Sprintf("holdpoint: no machine is published as nobody.localhost on port %d; publish one with: holdpoint expose MACHINE PORT --host nobody.localhost\n", f.proxy.port)
	if resp.StatusCode != 404 || body != want {
		t.Errorf("text: %d %q, want %q", resp.StatusCode, body, want)
	}
	resp, body = f.get(t, "GET", "nobody.localhost", "text/html,application/xhtml+xml", nil)
	if ct := resp.Header.Get("Content-Type"); resp.StatusCode != 404 || !strings.HasPrefix(ct, "text/html") ||
		!strings.Contains(body, "holdpoint expose MACHINE PORT --host nobody.localhost") {
		t.Errorf("page: %d %q %s", resp.StatusCode, ct, body)
	}
	for _, host := range []string{"127.0.0.1", "evil.example", "a';rm -rf $HOME;'.localhost"} {
		_, body = f.get(t, "GET", host, "text/html", nil)
		if strings.Contains(body, "--host "+host) || !strings.Contains(body, "--host NAME.localhost") {
			t.Errorf("the remedy for %q carries it: %s", host, body)
		}
	}
}

func TestFailuresOfTheMachine(t *testing.T) {
	stopped := machine.Allow("expose", "web", machine.Stopped, machine.Running)
	paused := machine.Allow("expose", "web", machine.Paused, machine.Running)
	const unreachable = "app.localhost leads to port 8080 of machine web, which cannot be reached: machine web is "
	cases := map[string]struct {
		err    error
		status int
		want   []string
	}{
		"stopped":  {stopped, 502, []string{unreachable + "stopped", "holdpoint start web"}},
		"paused":   {paused, 502, []string{unreachable + "paused", "holdpoint resume web"}},
		"restored": {errdefs.New(errdefs.Conflict, "restored; try again"), 502, []string{"which cannot be reached: restored; try again"}},
		"nothing listens": {errdefs.New(errdefs.NotFound, "dial tcp"), 502, []string{
			"app.localhost leads to port 8080 of machine web, where nothing answers", "holdpoint expose web PORT --host app.localhost",
		}},
		"dead port": {nil, 502, []string{"port 8080 of machine web", "connection refused", "holdpoint expose web PORT --host app.localhost"}},
		"busy":      {errdefs.New(errdefs.MachineBusy, "checkpoint create runs"), 503, []string{"machine web, which is busy: checkpoint create runs", "holdpoint operation ls"}},
		"deadline":  {context.DeadlineExceeded, 504, []string{"port 8080 of machine web", "holdpoint inspect web"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			f := start(t)
			f.publish("app.localhost", web(), "")
			f.fail(web(), c.err)
			for _, accept := range []string{"*/*", "text/html"} {
				resp, body := f.get(t, "GET", "app.localhost", accept, nil)
				body = strings.NewReplacer("&#34;", `"`).Replace(body)
				if resp.StatusCode != c.status || resp.Header.Get(problemHeader) == "" {
					t.Errorf("%s: %d %v", accept, resp.StatusCode, resp.Header)
				}
				for _, w := range c.want {
					if !strings.Contains(body, w) {
						t.Errorf("%s: %q lacks %q", accept, body, w)
					}
				}
				if strings.Contains(body, "expose:") || strings.Contains(name, "paused") && strings.Contains(body, "holdpoint start") {
					t.Errorf("%s: %q says what does not apply", accept, body)
				}
				if accept == "*/*" && strings.Count(body, "\n") != 1 {
					t.Errorf("text is not one line: %q", body)
				}
			}
		})
	}
}

func TestConnectIsRefused(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveHTTP(t, say("hello")))
	c, err := net.Dial("tcp", f.proxy.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_, _ = io.WriteString(c, "CONNECT app.localhost:80 HTTP/1.1\r\nHost: app.localhost\r\nConnection: close\r\n\r\n")
	b, _ := io.ReadAll(c)
	if !strings.HasPrefix(string(b), "HTTP/1.1 405 ") || f.dialCount(web()) != 0 {
		t.Errorf("got %q, %d dials", b, f.dialCount(web()))
	}
}

func TestAnotherPortWhenTaken(t *testing.T) {
	f := start(t)
	other, err := Start(Config{Backend: newWorld(), Port: f.proxy.port})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close(t.Context()) }()
	if other.Addr() == f.proxy.Addr() {
		t.Fatalf("both listen on %s", other.Addr())
	}
	resp, err := http.Get("http://" + other.Addr())
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if resp.StatusCode != 404 {
		t.Errorf("status %d", resp.StatusCode)
	}
	if want := fmt.Sprintf("http://app.localhost:%d/", other.port); other.URL("app.localhost") != want {
		t.Errorf("URL %q, want %q", other.URL("app.localhost"), want)
	}
}
