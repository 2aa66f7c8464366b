package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func machineOperation() *holdpointv1.Operation {
	return &holdpointv1.Operation{Id: "op-done", RequestId: "r0", Verb: "start", Machine: "web", MachineId: "m0123456789abcde", CreatedAt: ago(90 * time.Second)}
}

// Flags become what the API asks for.
func TestRequests(t *testing.T) {
	script := filepath.Join(t.TempDir(), "setup.sh")
	if err := writeFile(script, "echo hi\n"); err != nil {
		t.Fatal(err)
	}
	recipe := filepath.Join(t.TempDir(), "web.recipe")
	if err := writeFile(recipe, "size 2G\n"); err != nil {
		t.Fatal(err)
	}
	spec := func(change func(*holdpointv1.Spec)) *holdpointv1.Spec {
		s := &holdpointv1.Spec{Network: "internet", DiskFormat: "qcow2", Restart: "no"}
		change(s)
		return s
	}
	for _, test := range []struct {
		args string
		want proto.Message
	}{
		{
			"image build debian --name web --packages redis,vim --packages jq --size 4G --script " + script,
			&holdpointv1.BuildImageRequest{
				RequestId: "r", Recipe: "debian", Name: "web", Packages: []string{"redis", "vim", "jq"}, Script: "echo hi\n", DiskBytes: 4 << 30,
			},
		},
		{
			"image import /a/disk.qcow2 --name cloud --kernel /a/../k --initrd /i --sha256 0a --partition 3",
			&holdpointv1.ImportImageRequest{
				RequestId: "r", Path: "/a/disk.qcow2", Name: "cloud", Kernel: "/k", Initrd: "/i", Sha256: "0a", Partition: 3,
			},
		},
		{"image import /a/disk.raw --name cloud", &holdpointv1.ImportImageRequest{RequestId: "r", Path: "/a/disk.raw", Name: "cloud"}},
		{
			"image import /a/redis.tar --name redis --tag redis:7 --size 2G",
			&holdpointv1.ImportImageRequest{RequestId: "r", Path: "/a/redis.tar", Name: "redis", Tag: "redis:7", DiskBytes: 2 << 30},
		},
		{"image build " + recipe, &holdpointv1.BuildImageRequest{RequestId: "r", RecipeFile: recipe, Name: "web"}},
		{"image build " + recipe + " --name other", &holdpointv1.BuildImageRequest{RequestId: "r", RecipeFile: recipe, Name: "other"}},
		{"image rm debian", &holdpointv1.RemoveImageRequest{RequestId: "r", Image: "debian"}},
		{"run --image debian", &holdpointv1.RunMachineRequest{RequestId: "r", Image: "debian", Spec: spec(func(*holdpointv1.Spec) {})}},
		{
			"run web --image debian --memory 1.5G --cpus 4 --disk-size 16GiB --on-boot 'nginx -g x' --tmpfs /a --tmpfs /b,c",
			&holdpointv1.RunMachineRequest{RequestId: "r", Name: "web", Image: "debian", Spec: spec(func(s *holdpointv1.Spec) {
				s.MemoryBytes, s.Cpus, s.DiskBytes, s.OnBoot, s.Tmpfs = 3<<29, 4, 16<<30, "nginx -g x", []string{"/a", "/b,c"}
			})},
		},
		{"run --image debian --on-boot ''", &holdpointv1.RunMachineRequest{RequestId: "r", Image: "debian", NoOnBoot: true, Spec: spec(func(*holdpointv1.Spec) {})}},
		{
			"run web --image debian --rm",
			&holdpointv1.RunMachineRequest{RequestId: "r", Name: "web", Image: "debian", RemoveOnStop: true, Spec: spec(func(*holdpointv1.Spec) {})},
		},
		{
			"run web --image debian --restart always",
			&holdpointv1.RunMachineRequest{RequestId: "r", Name: "web", Image: "debian", Spec: spec(func(s *holdpointv1.Spec) { s.Restart = "always" })},
		},
		{"rename web web2", &holdpointv1.RenameMachineRequest{RequestId: "r", Machine: "web", Name: "web2"}},
		{
			"run web --image debian --boot --suspend-after 1m30s",
			&holdpointv1.RunMachineRequest{RequestId: "r", Name: "web", Image: "debian", Boot: true, Spec: spec(func(s *holdpointv1.Spec) {
				s.SuspendAfterMillis = 90_000
			})},
		},
		{
			"run web --image debian --disk-format raw",
			&holdpointv1.RunMachineRequest{RequestId: "r", Name: "web", Image: "debian", Spec: spec(func(s *holdpointv1.Spec) { s.DiskFormat = "raw" })},
		},
		{"suspend web", &holdpointv1.SuspendMachineRequest{RequestId: "r", Machine: "web"}},
		{"fork green", &holdpointv1.ForkRequest{RequestId: "r", Checkpoint: "green", Count: 1}},
		{
			"fork green --machine web --count 8 --name try --rm --as-is",
			&holdpointv1.ForkRequest{RequestId: "r", Checkpoint: "green", Machine: "web", Count: 8, Name: "try", RemoveOnStop: true, AsIs: true},
		},
		{"fork --machine web", &holdpointv1.ForkRequest{RequestId: "r", Machine: "web", Count: 1}},
		{"checkpoint verify green --machine web", &holdpointv1.VerifyCheckpointRequest{RequestId: "r", Checkpoint: "green", Machine: "web"}},
		{"checkpoint pool green 4", &holdpointv1.SetPoolRequest{RequestId: "r", Checkpoint: "green", Count: 4}},
		{"checkpoint pool green 0 --machine web", &holdpointv1.SetPoolRequest{RequestId: "r", Checkpoint: "green", Machine: "web"}},
		{"start web", &holdpointv1.StartMachineRequest{RequestId: "r", Machine: "web"}},
		{"stop web --timeout 1500ms", &holdpointv1.StopMachineRequest{RequestId: "r", Machine: "web", TimeoutMillis: 1500}},
		{"stop web --force", &holdpointv1.StopMachineRequest{RequestId: "r", Machine: "web", Force: true}},
		{"pause web", &holdpointv1.PauseMachineRequest{RequestId: "r", Machine: "web"}},
		{"resume web", &holdpointv1.ResumeMachineRequest{RequestId: "r", Machine: "web"}},
		{"rm web --force", &holdpointv1.RemoveMachineRequest{RequestId: "r", Machine: "web", Force: true}},
		{"checkpoint create web", &holdpointv1.CreateCheckpointRequest{RequestId: "r", Machine: "web", Kind: "full"}},
		{"checkpoint create web --kind disk", &holdpointv1.CreateCheckpointRequest{RequestId: "r", Machine: "web", Kind: "disk"}},
		{
			"checkpoint create web --kind disk --mode stopped --name n -m 'two words' --stop-running --allow-crash",
			&holdpointv1.CreateCheckpointRequest{
				RequestId: "r", Machine: "web", Kind: "disk", Mode: "stopped", Name: "n", Message: "two words", StopRunning: true, AllowCrash: true,
			},
		},
		{"checkpoint rm c --machine web", &holdpointv1.RemoveCheckpointRequest{RequestId: "r", Checkpoint: "c", Machine: "web"}},
		{
			"restore web before-agent --disk --yes --routes=restore --no-safety",
			&holdpointv1.RestoreMachineRequest{RequestId: "r", Machine: "web", Checkpoint: "before-agent", Kind: "disk", Routes: "restore", NoSafety: true},
		},
		{"restore web before-agent --full -y", &holdpointv1.RestoreMachineRequest{RequestId: "r", Machine: "web", Checkpoint: "before-agent", Kind: "full"}},
		{
			"restore web before-agent --full -y --as-is",
			&holdpointv1.RestoreMachineRequest{RequestId: "r", Machine: "web", Checkpoint: "before-agent", Kind: "full", AsIs: true},
		},
		{"expose web 8080 --host app.localhost", &holdpointv1.ExposeRequest{RequestId: "r", Machine: "web", Port: 8080, Host: "app.localhost"}},
		{"unexpose app.localhost", &holdpointv1.UnexposeRequest{RequestId: "r", Host: "app.localhost"}},
	} {
		t.Run(test.args, func(t *testing.T) {
			f, dir := serve(t)
			if r := holdpoint(dir, "", append(split(test.args), "--request-id", "r")...); r.code != 0 {
				t.Fatalf("%+v", r)
			}
			if diff := cmp.Diff(test.want, f.requests[0], protocmp.Transform()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A restore is bound to what was shown: the machine's generation and the very
// checkpoint; request ids are made where none is given.
func TestRestoreIsPinned(t *testing.T) {
	f, dir := serve(t)
	if r := holdpoint(dir, "", "restore", "web", "before-agent", "--disk", "--yes"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	req := asked[*holdpointv1.RestoreMachineRequest](t, f)
	if req.GetGeneration() != 3 || req.GetCheckpoint() != "c1000000000000aa" || len(req.GetRequestId()) < 16 {
		t.Errorf("request %v", req)
	}
}

// What is not UTF-8 is refused before anything is sent, with the argument's
// name.
func TestNotUTF8(t *testing.T) {
	t.Setenv("NOT_TEXT", "a\xff")
	script := filepath.Join(t.TempDir(), "\xffscript")
	if err := writeFile(script, "echo \xff\n"); err != nil {
		t.Fatal(err)
	}
	f, dir := serve(t)
	for _, test := range []struct {
		args string
		code int
		says string
	}{
		{"exec web -- ls \xff", 125, `exec: the argument "\xff" is not UTF-8`},
		{"exec \xff -- ls", 125, `exec: the argument "\xff" is not UTF-8`},
		{"exec web -e A=\xff -- ls", 125, `exec: the value of --env "A=\xff" is not UTF-8`},
		{"exec web -e NOT_TEXT -- ls", 125, `environment: the value here of NOT_TEXT, "a\xff" is not UTF-8`},
		{"exec web -w \xff -- ls", 125, `exec: the value of --workdir "\xff" is not UTF-8`},
		{"exec web -u \xff -- ls", 125, `exec: the value of --user "\xff" is not UTF-8`},
		{"shell web -u \xff", 125, `shell: the value of --user "\xff" is not UTF-8`},
		{"attach web \xff", 125, `attach: the argument "\xff" is not UTF-8`},
		{"fork green -- ls \xff", 125, `fork: the argument "\xff" is not UTF-8`},
		{"fork green --name \xff", 2, `fork: the value of --name "\xff" is not UTF-8`},
		{"run web --image debian --on-boot \xff", 2, `run: the value of --on-boot "\xff" is not UTF-8`},
		{"run web --image debian --tmpfs /\xff", 2, `run: the value of --tmpfs "/\xff" is not UTF-8`},
		{"checkpoint create web -m \xff", 2, `checkpoint create: the value of --message "\xff" is not UTF-8`},
		{"stop \xff", 2, `stop: the argument "\xff" is not UTF-8`},
		{"stop web --request-id \xff", 2, `stop: the value of --request-id "\xff" is not UTF-8`},
		{"image build debian --packages a,\xff", 2, `image build: the value of --packages "\xff" is not UTF-8`},
		{"image build debian --script " + script, 2, `it is not UTF-8`},
		{"cp " + script + " web:\xff", 2, `cp: the argument "web:\xff" is not UTF-8`},
		{"cp web:\xff here", 2, `cp: the argument "web:\xff" is not UTF-8`},
	} {
		r := holdpoint(dir, "", split(test.args)...)
		if r.code != test.code || !strings.Contains(r.stderr, test.says) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%q: %+v", test.args, r)
		}
		if requests := f.asks(); len(requests) != 0 {
			t.Errorf("%q sent %v", test.args, requests)
		}
	}
	if r := holdpoint(dir, "", "cp", script, "web:"+filepath.Join(t.TempDir(), "there")); r.code != 0 {
		t.Errorf("cp of a file whose name here is not UTF-8: %+v", r)
	}
}

func TestExecRequests(t *testing.T) {
	t.Setenv("FROM_HERE", "x y")
	f, dir := serve(t)
	r := holdpoint(dir, "", split("exec web -e A=1 -e FROM_HERE -e NOT_SET_HERE -w /srv -u www:www -t -- echo -n")...)
	if want := (run{0, "-n\n", "said\n"}); r != want {
		t.Errorf("%+v", r)
	}
	got := asked[*holdpointv1.GuestExecRequest](t, f).GetMessage().GetStart()
	want := &agentv1.ExecStart{Argv: []string{"echo", "-n"}, Env: []string{"A=1", "FROM_HERE=x y"}, Cwd: "/srv", User: "www:www", Tty: true, NoInput: true}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

func TestExecStreams(t *testing.T) {
	_, dir := serve(t)
	big := strings.Repeat("0123456789abcdef", 1<<16)
	for _, test := range []struct {
		name, stdin string
		args        []string
		want        run
	}{
		{"input passes through", big, []string{"exec", "web", "-i", "--", "cat"}, run{0, big, ""}},
		{"without -i there is none", "unread", []string{"exec", "web", "--", "cat"}, run{0, "", ""}},
		{"the exit code is the command's", "", []string{"exec", "web", "--", "fail", "42"}, run{42, "", ""}},
		{"a command that is missing", "", []string{"exec", "web", "--", "missing"}, run{127, "", "holdpoint: exec in web: missing: not found\n"}},
		{"our own failure", "", []string{"exec", "web", "--", "busy"}, run{125, "", "holdpoint: exec in web: the machine is stopped; `holdpoint start web` boots it\n"}},
		{"a stream that breaks off", "", []string{"exec", "web", "--", "gone"}, run{125, "", "holdpoint: exec in web: the connection ended before the command did; look with `holdpoint exec web -- ps`\n"}},
		{"a held command", "", []string{"exec", "web", "--", "held", "x"}, run{0, "x\n", "holdpoint: waiting: a checkpoint is made\nsaid\n"}},
		{"a held command, quietly", "", []string{"-q", "exec", "web", "--", "held", "x"}, run{0, "x\n", "said\n"}},
		{"a detached command", "", []string{"exec", "web", "--detach", "--", "echo", "x"}, run{0, "cmd-1\n", ""}},
		{"a shell without a terminal reads commands", "text", []string{"shell", "web"}, run{0, "$ text", ""}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := holdpoint(dir, test.stdin, test.args...); got != test.want {
				t.Errorf("got code %d, stdout %.200q, stderr %q", got.code, got.stdout, got.stderr)
			}
		})
	}
}

// The input of a detached command is empty, unless it is kept open for those
// who attach later.
func TestDetachedInput(t *testing.T) {
	for flags, end := range map[string]bool{"": true, "-i": false, "-t": false, "-it": false} {
		f, dir := serve(t)
		f.guest.inputs = make(chan string, 1)
		args := append([]string{"exec", "web", "--detach"}, strings.Fields(flags)...)
		if got, want := holdpoint(dir, "unread", append(args, "--", "input")...), (run{0, "cmd-1\n", ""}); got != want {
			t.Errorf("exec --detach %s: %+v", flags, got)
		}
		want := "closed"
		if end {
			want = "end"
		}
		if got := <-f.guest.inputs; got != want {
			t.Errorf("exec --detach %s: the input's first message is %q, want %q", flags, got, want)
		}
	}
}

// A machine that refuses is told of by the verb that was given.
func TestShellOfStoppedMachine(t *testing.T) {
	f, dir := serve(t)
	f.guest.refuse = errdefs.New(errdefs.WrongState, "exec: machine web is stopped; run holdpoint start web")
	if got, want := holdpoint(dir, "", "shell", "web"), (run{125, "", "holdpoint: shell: machine web is stopped; run holdpoint start web\n"}); got != want {
		t.Errorf("shell: %+v", got)
	}
	if got, want := holdpoint(dir, "", "exec", "web", "--", "x"), (run{125, "", "holdpoint: exec: machine web is stopped; run holdpoint start web\n"}); got != want {
		t.Errorf("exec: %+v", got)
	}
}

func TestAttach(t *testing.T) {
	f, dir := serve(t)
	f.commands = []*agentv1.Command{
		{Id: "cmd-1", Argv: []string{"make", "all things"}, Detached: true, Running: true},
		{Id: "cmd-2", Argv: []string{"top"}, Running: true},
		{Id: "cmd-3", Argv: []string{"sleep"}, Detached: true, Running: true},
	}
	if got, want := holdpoint(dir, "", "attach", "web", "cmd-3", "--no-history"), (run{3, "history of cmd-3\n", ""}); got != want {
		t.Errorf("attach: %+v", got)
	}
	if !asked[*holdpointv1.GuestExecRequest](t, f).GetMessage().GetAttach().GetNoHistory() {
		t.Error("--no-history is lost")
	}
	got := holdpoint(dir, "", "attach", "web")
	if got.code != 125 || got.stderr != "holdpoint: attach to web: say which command: cmd-1 (make 'all things'), cmd-3 (sleep)\n" {
		t.Errorf("attach to one of two: %+v", got)
	}
	f.commands = f.commands[:2]
	if got, want := holdpoint(dir, "", "attach", "web"), (run{3, "history of cmd-1\n", ""}); got != want {
		t.Errorf("attach to the only one: %+v", got)
	}
	f.commands = nil
	if got := holdpoint(dir, "", "attach", "web"); got.code != 125 || !strings.Contains(got.stderr, "no detached command is there") {
		t.Errorf("attach to none: %+v", got)
	}
	if got := holdpoint(dir, "", "attach", "web", "gone"); got.code != 125 || !strings.Contains(got.stderr, "has the id gone; it may have ended, and an attach have fetched what it left") {
		t.Errorf("attach to one that is gone: %+v", got)
	}
}

func TestCopy(t *testing.T) {
	f, dir := serve(t)
	f.guest.root = t.TempDir()
	here := t.TempDir()
	if err := writeFile(filepath.Join(here, "page"), strings.Repeat("x", 600<<10)); err != nil {
		t.Fatal(err)
	}
	r := holdpoint(dir, "", "cp", filepath.Join(here, "page"), "web:new")
	if want := (run{0, "1 file, 600 KiB\n", ""}); r != want {
		t.Fatalf("upload: %+v", r)
	}
	r = holdpoint(dir, "", "cp", "web:new", filepath.Join(here, "back"))
	if want := (run{0, "1 file, 600 KiB\n", ""}); r != want {
		t.Fatalf("download: %+v", r)
	}
	info, err := os.Stat(filepath.Join(here, "back"))
	if err != nil || info.Size() != 600<<10 || info.Mode().Perm() != 0o640 {
		t.Fatalf("what came back: %v, %v", info, err)
	}
	for _, test := range []struct {
		from, to string
		code     int
		says     string
	}{
		{"web:none", here, 3, "none"},
		{filepath.Join(here, "none"), "web:x", 3, "none"},
		{here, "nobody:x", 3, "nobody"},
		{here, here, 2, "exactly one"},
		{"web:a", "web:b", 2, "exactly one"},
		{"web:", here, 2, "path is missing"},
		{"./web:a", here, 2, "exactly one"},
	} {
		r := holdpoint(dir, "", "cp", test.from, test.to)
		if r.code != test.code || !strings.Contains(r.stderr, test.says) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("cp %s %s: %+v", test.from, test.to, r)
		}
	}
}

// Completion asks a daemon that is there, and never starts one.
func TestCompletion(t *testing.T) {
	f, dir := serve(t)
	f.ops["op-1"] = machineOperation()
	f.commands = []*agentv1.Command{{Id: "cmd-1", Detached: true}}
	for args, want := range map[string]string{
		"stop":                          "web",
		"cp":                            "web:",
		"image inspect":                 "debian",
		"run --image":                   "debian",
		"restore":                       "web",
		"restore web":                   "c3000000000000aa\nc2000000000000aa\nbefore-agent",
		"checkpoint show":               "c3000000000000aa\nc2000000000000aa\nbefore-agent",
		"checkpoint create web --kind":  "full\ndisk",
		"unexpose":                      "app.localhost",
		"operation wait":                "op-done",
		"attach web":                    "cmd-1",
		"completion":                    "bash\nzsh\nfish",
		"restore web before-agent":      "",
		"checkpoint rm c --machine":     "web",
		"restore web before --routes":   "keep\nrestore",
		"checkpoint create x --mode":    "frozen\nstopped",
		"operation ls --machine":        "web",
		"image build":                   "debian\ndebian-systemd",
		"fork":                          "c3000000000000aa\nc2000000000000aa\nbefore-agent",
		"fork before-agent":             "",
		"fork --machine":                "web",
		"suspend":                       "web",
		"checkpoint verify":             "c3000000000000aa\nc2000000000000aa\nbefore-agent",
		"checkpoint pool":               "c3000000000000aa\nc2000000000000aa\nbefore-agent",
		"checkpoint pool c":             "",
		"expose web 80 --host not-name": "",
	} {
		r := holdpoint(dir, "", append(append([]string{"__complete"}, split(args)...), "")...)
		got, _, _ := strings.Cut(r.stdout, ":4\n")
		if strings.TrimSpace(got) != want || r.code != 0 {
			t.Errorf("%s: %q, want %q (%s)", args, got, want, r.stderr)
		}
	}
	r := holdpoint(shortDir(t), "", "__complete", "stop", "")
	if !strings.HasPrefix(r.stdout, ":") {
		t.Errorf("without a daemon: %+v", r)
	}
}

// A question is asked again, once, when the daemon goes away under it.
func TestQuestionsAreAskedAgain(t *testing.T) {
	f, dir := serve(t, func(f *fake) { f.broken.Store(1) })
	if r := holdpoint(dir, "", "restore", "web", "before-agent", "--disk", "--plan"); r.code != 0 || !strings.Contains(r.stdout, "app.localhost") {
		t.Errorf("restore --plan: %+v", r)
	}
	f.broken.Store(2)
	if r := holdpoint(dir, "", "restore", "web", "before-agent", "--disk", "--plan"); r.code != 130 || !strings.Contains(r.stderr, "the daemon ended meanwhile") {
		t.Errorf("restore --plan, twice broken: %+v", r)
	}
}

// Whenever the daemon goes away under a verb, it is done with the next one, or
// the verb says what happened, as it does of an operation that was cut off.
func TestDaemonGoesAwayUnderAnyVerb(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	for args, want := range map[string]int{
		"ls": 0, "inspect web": 0, "image ls": 0, "image inspect debian": 0, "image build debian": 0, "image rm debian": 0,
		"run web --image debian": 0, "start web": 0, "stop web": 0, "pause web": 0, "resume web": 0, "suspend web": 0, "rm web": 0,
		"fork green": 0, "checkpoint create web": 0, "checkpoint ls": 0, "checkpoint show green": 0, "checkpoint rm c": 0,
		"checkpoint verify green": 0, "checkpoint pool green 4": 0, "log web": 0, "routes": 0, "expose web 80": 0, "unexpose app.localhost": 0,
		"restore web before-agent --disk --yes": 0, "operation ls": 0, "operation show op-done": 0, "operation wait op-done": 0,
		"logs web": 130, "cp web:a " + file: 130, "operation cancel op-done": 130, "exec web -- true": 125, "attach web": 3,
	} {
		t.Run(args, func(t *testing.T) {
			f, dir := serve(t, func(f *fake) {
				f.ops["op-done"] = f.end(machineOperation())
				f.commands = []*agentv1.Command{{Id: "cmd-1", Detached: true}}
				f.broken.Store(1)
			})
			if r := holdpoint(dir, "", split(args)...); r.code != want || want > 100 && !strings.Contains(r.stderr, "the daemon ended meanwhile") {
				t.Errorf("broken once: %+v, want code %d", r, want)
			}
			f.broken.Store(100)
			want := max(want, 130)
			if strings.HasPrefix(args, "exec") {
				want = 125
			}
			if r := holdpoint(dir, "", split(args)...); r.code != want || !strings.Contains(r.stderr, "the daemon ended meanwhile") {
				t.Errorf("broken always: %+v, want code %d", r, want)
			}
		})
	}
}

// A command whose stream ends with the daemon is hung up; one that was attached
// to goes on.
func TestDaemonGoesAwayUnderACommand(t *testing.T) {
	_, dir := serve(t, func(f *fake) { f.commands = []*agentv1.Command{{Id: "torn", Detached: true}} })
	for args, want := range map[string]string{
		"exec web -- torn": "exec in web: the daemon ended meanwhile, and the command was hung up; run it again, with --detach if",
		"attach web":       "attach in web: the daemon ended meanwhile; the command goes on: `holdpoint attach web torn`",
	} {
		if r := holdpoint(dir, "", split(args)...); r.code != 125 || !strings.Contains(r.stderr, want) {
			t.Errorf("%s: %+v, want %q", args, r, want)
		}
	}
}
