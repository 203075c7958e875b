package access

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

// accounts returns a listener that lets in service accounts that fit a pattern.
func accounts(kubeconfig, pattern string) config.Listener {
	return config.Listener{
		TokenReview: config.TokenReview{Kubeconfig: kubeconfig, Audience: "isthmus"},
		Allow:       []config.Allow{{Peer: config.Peer{ServiceAccount: pattern}}},
	}
}

// Whose a token is decides, as a real API server says it, and while that server
// cannot be asked nobody unknown gets in, nothing ends, and the status says so.
func TestServiceAccounts(t *testing.T) {
	kube := testkube.Start(t, testkube.Config{})
	kube.Apply(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: isthmus-token-review}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:auth-delegator"}
subjects: [{kind: ServiceAccount, namespace: isthmus, name: isthmus}]
`)
	bridge := kube.ServiceAccount(t, "isthmus", "isthmus")
	kubeconfig := kube.KubeconfigOf(t, map[string]any{"token": bridge})
	powerless := kube.KubeconfigOf(t, map[string]any{"token": kube.ServiceAccount(t, "isthmus", "powerless")})
	watcher := kube.ServiceAccount(t, "tools", "watcher", "isthmus")
	late := kube.ServiceAccount(t, "tools", "late", "isthmus")
	later := kube.ServiceAccount(t, "tools", "later", "isthmus")
	plain := insecure.NewCredentials()

	g, reg, _ := newGate(t, accounts(kubeconfig, "tools/*"))
	address := serve(t, g)
	stream, err := open(t, address, plain, watcher)
	if err != nil {
		t.Fatalf("a service account that the rule names: %v", err)
	}
	for name, c := range map[string]struct {
		token string
		want  codes.Code
	}{
		"another namespace's": {kube.ServiceAccount(t, "shop", "watcher", "isthmus"), codes.PermissionDenied},
		"another audience's":  {kube.ServiceAccount(t, "tools", "watcher", "vault"), codes.PermissionDenied},
		"the API server's":    {kube.ServiceAccount(t, "tools", "watcher"), codes.PermissionDenied},
		"a user's":            {kube.Token, codes.PermissionDenied},
		"nobody's":            {"a.b.c", codes.PermissionDenied},
		"changed":             {watcher[:len(watcher)-8] + "AAAAAAAA", codes.PermissionDenied},
		"none":                {"", codes.Unauthenticated},
	} {
		if _, err := open(t, address, plain, c.token); status.Code(err) != c.want {
			t.Errorf("a token that is %s: %v, want %v", name, err, c.want)
		}
	}
	if err := echo(stream); err != nil {
		t.Errorf("the stream beside them: %v", err)
	}
	if n := testutil.ToFloat64(g.m.reviews.WithLabelValues("listen.xds", reviewAccount)); n < 1 {
		t.Errorf("%v tokens of accounts are counted", n)
	}
	if n, err := testutil.GatherAndCount(reg, "isthmus_access_token_reviews_total"); err != nil || n != 3 {
		t.Errorf("%d outcomes, %v", n, err)
	}

	// An account that is deleted. What the API server itself remembers passes
	// meanwhile, and is waited for below.
	gone := kube.ServiceAccount(t, "tools", "gone", "isthmus")
	if _, err := open(t, address, plain, gone); err != nil {
		t.Fatalf("before it is deleted: %v", err)
	}
	kube.Delete(t, "apiVersion: v1\nkind: ServiceAccount\nmetadata: {namespace: tools, name: gone}\n", "")

	t.Run("a bridge that may not ask", func(t *testing.T) {
		g, _, log := newGate(t, accounts(powerless, "tools/*"))
		if _, err := open(t, serve(t, g), plain, watcher); status.Code(err) != codes.Unavailable {
			t.Errorf("%v, want Unavailable", err)
		}
		if text := log.String(); !strings.Contains(text, "403 Forbidden") || !strings.Contains(text, "system:auth-delegator") || strings.Contains(text, watcher) {
			t.Errorf("the log has no cure, or the token:\n%s", text)
		}
	})
	t.Run("in a pod", func(t *testing.T) {
		dir := t.TempDir()
		ca, err := os.ReadFile(kube.CAFile)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(dir, "ca.crt"), ca)
		writeFile(t, filepath.Join(dir, "token"), []byte(bridge+"\n"))
		host, port, _ := strings.Cut(kube.Addr, ":")
		url, err := podAddress(func(name string) string {
			return map[string]string{"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}[name]
		})
		if err != nil {
			t.Fatal(err)
		}
		server, err := inPod(dir, url)
		if err != nil {
			t.Fatal(err)
		}
		defer server.client.CloseIdleConnections()
		if user, err := server.review(t.Context(), watcher, "isthmus"); err != nil || user != "system:serviceaccount:tools:watcher" {
			t.Errorf("%q, %v", user, err)
		}
	})
	t.Run("admin", func(t *testing.T) {
		l := accounts(kubeconfig, "tools/watcher")
		l.Allow[0].Role = config.RoleRead
		g, _, _ := newGate(t, l)
		h := g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			role, _ := RoleOf(r.Context())
			fmt.Fprint(w, role == Read)
		}), func(string) bool { return false })
		for token, want := range map[string]int{watcher: http.StatusOK, late: http.StatusUnauthorized} {
			r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1/", nil)
			r.Header.Set("Authorization", "Bearer "+token)
			w := httptest.NewRecorder()
			if h.ServeHTTP(w, r); w.Code != want || want == http.StatusOK && w.Body.String() != "true" {
				t.Errorf("%d %s, want %d", w.Code, w.Body, want)
			}
		}
	})
	t.Run("rules that change", func(t *testing.T) {
		g, _, _ := newGate(t, config.Listener{})
		address := serve(t, g)
		stays, err := open(t, address, plain, watcher)
		if err != nil {
			t.Fatal(err)
		}
		ends, err := open(t, address, plain, late)
		if err != nil {
			t.Fatal(err)
		}
		g.Set(policy(t, accounts(kubeconfig, "tools/watcher")))
		if err := echo(stays); err != nil {
			t.Errorf("the stream of the account: %v", err)
		}
		if err := ends.RecvMsg(new(emptypb.Empty)); status.Code(err) != codes.PermissionDenied {
			t.Errorf("the stream of another: %v", err)
		}
	})

	reviewer := g.policy.Load().review
	testwait.Eventually(t, patience, "the account that was deleted gets in no more, once it is asked about again", func() (string, bool) {
		reviewer.mu.Lock()
		clear(reviewer.accounts) // a minute passes
		clear(reviewer.strangers)
		reviewer.mu.Unlock()
		_, err := open(t, address, plain, gone)
		return fmt.Sprint(err), status.Code(err) == codes.PermissionDenied
	})

	kube.Kill()
	if _, err := open(t, address, plain, later); status.Code(err) != codes.Unavailable {
		t.Errorf("without an API server, one that was not asked about before: %v, want Unavailable", err)
	}
	g.Set(policy(t, accounts(kubeconfig, "*/watcher")))
	if err := echo(stream); err != nil {
		t.Errorf("without an API server, after a reload, the stream that was open: %v", err)
	}
	kube.Restart(t)
	testwait.Eventually(t, patience, "the API server is asked again", func() (string, bool) {
		_, err := open(t, address, plain, watcher)
		return fmt.Sprint(err), err == nil
	})

	// An API server that hangs is not waited for without end.
	g, _, _ = newGate(t, accounts(kubeconfig, "tools/*"))
	kube.Pause()
	_, err = open(t, serve(t, g), plain, later)
	kube.Continue()
	if status.Code(err) != codes.Unavailable {
		t.Errorf("an API server that hangs: %v, want Unavailable", err)
	}
}

// A rule of service accounts asks only about callers that meet the rest of it,
// and whom no rule before it lets in.
func TestWantsReview(t *testing.T) {
	sa := func(role, cidr string) config.Allow {
		return config.Allow{Role: role, Peer: config.Peer{ServiceAccount: "a/b", CIDR: cidr}}
	}
	from := func(role, cidr string) config.Allow { return config.Allow{Role: role, Peer: config.Peer{CIDR: cidr}} }
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	writeFile(t, kubeconfig, []byte(`{current-context: x, contexts: [{name: x, context: {cluster: x, user: x}}], clusters: [{name: x, cluster: {server: "https://127.0.0.1:1"}}], users: [{name: x, user: {token: t}}]}`))
	for _, c := range []struct {
		rules []config.Allow
		want  bool
	}{
		{[]config.Allow{sa("", "")}, true},
		{[]config.Allow{sa("", "10.2.0.0/16")}, false},
		{[]config.Allow{from("", "10.1.0.0/16"), sa("", "")}, false},
		{[]config.Allow{sa("", ""), from("", "10.1.0.0/16")}, true},
		{[]config.Allow{from(config.RoleRead, "10.1.0.0/16"), sa("", "")}, true},
		{[]config.Allow{from(config.RoleRead, "10.1.0.0/16"), sa(config.RoleRead, "")}, false},
	} {
		p := policy(t, config.Listener{TokenReview: config.TokenReview{Kubeconfig: kubeconfig}, Allow: c.rules})
		caller := Caller{Address: netip.MustParseAddr("10.1.2.3"), Token: "a.b.c"}
		if got := p.wantsReview(&caller); got != c.want {
			t.Errorf("%+v: %v, want %v", c.rules, got, c.want)
		}
		if caller.Token = ""; p.wantsReview(&caller) {
			t.Errorf("%+v: without a token there is nothing to ask", c.rules)
		}
		p.Close()
	}
}

// What was asked about is remembered for a while and in bounds, and strangers
// do not displace accounts.
func TestReviewsRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reviewer{accounts: map[[32]byte]verdict{}, strangers: map[[32]byte]verdict{}}
		r.remember([32]byte{1}, "a/b")
		for i := range maxReviewed + 1 {
			r.remember([32]byte{2, byte(i), byte(i >> 8), byte(i >> 16)}, "")
		}
		if n := len(r.strangers); n > maxReviewed {
			t.Errorf("%d strangers are remembered", n)
		}
		if v, ok := r.known([32]byte{1}); !ok || v.account != "a/b" {
			t.Errorf("the account: %v, %v", v, ok)
		}
		r.remember([32]byte{2}, "")
		time.Sleep(strangerTime)
		if _, ok := r.known([32]byte{2}); ok {
			t.Error("a stranger is remembered for longer than that")
		}
		time.Sleep(accountTime - strangerTime)
		if _, ok := r.known([32]byte{1}); ok {
			t.Error("an account is remembered for longer than that")
		}
	})
}

// One who sends many tokens has one turn at a time, and others theirs.
func TestReviewTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := NewTurns(reviewsAtOnce, 1, 0)
		flood, good := "10.0.0.1", "10.0.0.2"
		pass, err := turns.Enter(t.Context(), flood)
		if err != nil {
			t.Fatal(err)
		}
		second := make(chan func())
		for range 100 {
			go func() {
				pass, err := turns.Enter(t.Context(), flood)
				if err == nil {
					second <- pass.Leave
				}
			}()
		}
		synctest.Wait()
		if n := reviewsAtOnce - turns.free; n != 1 {
			t.Errorf("%d reviews of one address at a time", n)
		}
		other, err := turns.Enter(t.Context(), good)
		if err != nil {
			t.Fatal(err)
		}
		other.Leave()
		pass.Leave()
		for range 100 {
			(<-second)()
		}
		synctest.Wait()
		if len(turns.of) != 0 || turns.free != reviewsAtOnce {
			t.Errorf("%d turns and %d slots are left", len(turns.of), reviewsAtOnce-turns.free)
		}
	})
}

// A kubeconfig is used as a whole or refused, and no error repeats a secret.
func TestKubeconfigs(t *testing.T) {
	const canary = "canary-9f1c"
	file := filepath.Join(t.TempDir(), "kubeconfig")
	write := func(cluster, user string) {
		writeFile(t, file, fmt.Appendf(nil, `{current-context: x, contexts: [{name: x, context: {cluster: x, user: x}}], clusters: [{name: x, cluster: %s}], users: [{name: x, user: %s}]}`, cluster, user))
	}
	for _, c := range []struct{ cluster, user, want string }{
		{`{server: "http://a"}`, `{token: canary-9f1c}`, "must be https"},
		{`{server: "https://a", insecure-skip-tls-verify: true}`, `{token: canary-9f1c}`, "insecure-skip-tls-verify"},
		{`{server: "https://a", certificate-authority: none.pem}`, `{token: canary-9f1c}`, "none.pem"},
		{`{server: "https://a", certificate-authority-data: "!"}`, `{token: canary-9f1c}`, "is not a kubeconfig"},
		{`{server: "https://a"}`, `{client-certificate-data: Y2FuYXJ5LTlmMWM=, client-key-data: Y2FuYXJ5LTlmMWM=}`, "client-certificate"},
		{`{server: "https://a"}`, `{exec: {command: canary-9f1c}}`, "exec"},
		{`{server: "https://a"}`, `{tokenFile: none}`, "none"},
		{`[canary-9f1c`, `{}`, "is not a kubeconfig"},
	} {
		write(c.cluster, c.user)
		_, err := newReviewer(config.TokenReview{Kubeconfig: file})
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), canary) {
			t.Errorf("%s %s: %v, want %q", c.cluster, c.user, err, c.want)
		}
	}
	write(`{server: "https://a"}`, `{token: old}`)
	g := NewGate(stream.NewServer(nil).Listener("listen.xds"), policy(t, accounts(file, "a/b")), NewMetrics(prometheus.NewRegistry()), nil, slog.New(slog.DiscardHandler))
	defer g.Close()
	server := g.policy.Load().review.server
	if token := server.get().token; token != "old" {
		t.Errorf("the token is %q", token)
	}
	write(`{server: "https://a"}`, `{token: renewed}`)
	if token := server.get().token; token != "renewed" {
		t.Errorf("after the file was renewed the token is %q", token)
	}
}

// Whatever is answered, nobody has an account of whom it is not said that he is
// authenticated for the audience.
func FuzzReview(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `null`, `{"kind":"Status","message":"tokenreviews is forbidden"}`,
		`{"kind":"TokenReview","status":{"authenticated":true,"user":{"username":"system:serviceaccount:a:b"},"audiences":["isthmus"]}}`,
		`{"kind":"TokenReview","status":{"authenticated":true,"user":{"username":"system:serviceaccount:a:b:c"}}}`,
		`{"kind":"TokenReview","status":{"authenticated":false,"user":{"username":"system:serviceaccount:a:b"},"audiences":["isthmus"]}}`,
	} {
		f.Add(http.StatusCreated, []byte(seed), "secret-token")
	}
	f.Add(http.StatusCreated, []byte(`{"kind":"TokenReview","status":`+strings.Repeat(`{"user":`, 9000)+"1"+strings.Repeat("}", 9000)+"}"), "secret-token")
	f.Fuzz(func(t *testing.T, code int, answer []byte, token string) {
		user, err := readReview(code, answer, token, "isthmus")
		var said tokenReview
		right := json.Unmarshal(answer, &said) == nil && said.Kind == "TokenReview" && said.Status.Authenticated && code/100 == 2
		if user != "" && (err != nil || !right || !strings.Contains(strings.Join(said.Status.Audiences, " "), "isthmus")) {
			t.Errorf("%q is %q, %v", answer, user, err)
		}
		if err != nil && len(token) > 20 && strings.Contains(err.Error(), token) {
			t.Errorf("%v repeats the token", err)
		}
		if account := accountOf(user); account != "" && (strings.Count(account, "/") != 1 || !strings.HasPrefix(user, "system:serviceaccount:")) {
			t.Errorf("%q is the account of %q", account, user)
		}
	})
}
