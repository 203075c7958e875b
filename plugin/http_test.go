package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
)

// TestHTTPCheck shows every fault of the block, each by its field.
func TestHTTPCheck(t *testing.T) {
	fields := func(errs []error) (all []string) {
		for _, err := range errs {
			f, ok := errors.AsType[*FieldError](err)
			if !ok || f.Reason == "" {
				t.Errorf("%v is not a FieldError with a reason", err)
				continue
			}
			all = append(all, f.Field)
		}
		slices.Sort(all)
		return all
	}
	for _, tt := range []struct {
		block HTTP
		want  []string
	}{
		{HTTP{}, nil},
		{HTTP{Username: "u", PasswordFile: "p", Timeout: Duration(time.Minute), TLS: TLS{CertFile: "c", KeyFile: "k", CAFile: "a"}}, nil},
		{HTTP{Username: "u", UsernameFile: "f", Password: "p", PasswordFile: "f"}, []string{"password_file", "username_file"}},
		{HTTP{Password: "p", Token: "t", TokenFile: "f"}, []string{"token", "token_file", "username"}},
		{HTTP{Timeout: 1, TLS: TLS{CertFile: "c", CAFile: "a", CAPath: "b"}}, []string{"timeout", "tls.ca_path", "tls.cert_file"}},
	} {
		if diff := cmp.Diff(tt.want, fields(tt.block.Check())); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", tt.block, diff)
		}
	}
	servers := []string{"http://a:80/eureka", "a:80", "ftp://a", "http://u:p@a", "http://a/?q", "http://", "http://a:80/eureka", "\x00"}
	if diff := cmp.Diff([]string{"s[1]", "s[2]", "s[3]", "s[4]", "s[5]", "s[6]", "s[7]"}, fields(CheckServers("s", servers))); diff != "" {
		t.Errorf("servers (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"s"}, fields(CheckServers("s", nil))); diff != "" {
		t.Errorf("no servers (-want +got):\n%s", diff)
	}
}

// TestHTTPFiles shows that files that are missing at the start are faults of
// their fields.
func TestHTTPFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	none, empty, text := filepath.Join(dir, "none"), write("empty", " \n"), write("text", "text")
	long := write("long", strings.Repeat("x", maxSecretBytes+1))
	folder := filepath.Join(dir, "folder")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	for field, block := range map[string]HTTP{
		"token_file":    {TokenFile: none},
		"username_file": {UsernameFile: empty},
		"password_file": {Username: "u", PasswordFile: long},
		"tls.ca_file":   {TLS: TLS{CAFile: text}},
		"tls.ca_path":   {TLS: TLS{CAPath: folder}},
		"tls.cert_file": {TLS: TLS{CertFile: none, KeyFile: none}},
	} {
		_, err := block.NewClient(1)
		if f, ok := errors.AsType[*FieldError](err); !ok || f.Field != field {
			t.Errorf("%s: error %v", field, err)
		}
	}
}

func get(ctx context.Context, c *HTTPClient, url string) (map[string]string, error) {
	var v map[string]string
	err := c.GetJSON(ctx, url, &v)
	return v, err
}

// TestHTTPClient shows credentials, which are read again for every request, and
// each answer that is none.
func TestHTTPClient(t *testing.T) {
	hang := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("/who", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `{"who": %q}`, r.Header.Get("Authorization"))
	})
	mux.HandleFunc("/no", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "not\n  here", http.StatusForbidden) })
	mux.HandleFunc("/away", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/who", http.StatusFound) })
	mux.HandleFunc("/long", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"a": %q}`, strings.Repeat("x", 3<<20))
	})
	mux.HandleFunc("/more", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{} {}`) })
	mux.HandleFunc("/page", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `<html>`) })
	mux.HandleFunc("/cut", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		fmt.Fprint(w, `{"a":`)
	})
	mux.HandleFunc("/hang", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"a":`)
		w.(http.Flusher).Flush()
		<-hang
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	defer close(hang)

	file := filepath.Join(t.TempDir(), "token")
	token := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	token("one\n")
	c, err := HTTP{TokenFile: file, Timeout: Duration(time.Minute)}.NewClient(2 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	impatient, err := HTTP{TokenFile: file, Timeout: Duration(time.Second)}.NewClient(2 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer impatient.Close()
	for _, text := range []string{"one", "two"} {
		token(text)
		if v, err := get(t.Context(), c, server.URL+"/who"); err != nil || v["who"] != "Bearer "+text {
			t.Errorf("token %s: %v, %v", text, v, err)
		}
	}
	for path, want := range map[string]string{
		"/no": `answers status 403: the credentials do not permit reading it "not here"`, "/away": "status 302", "/long": "longer than 2 MiB",
		"/more": "goes on", "/page": "not JSON", "/cut": "unexpected EOF", "/hang": "no whole answer within 1s",
	} {
		by := c
		if path == "/hang" {
			by = impatient
		}
		if v, err := get(t.Context(), by, server.URL+path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v, want an error with %q", path, v, err, want)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if _, err := get(t.Context(), c, server.URL+"/who"); err == nil || !strings.Contains(err.Error(), "token_file") {
		t.Errorf("without the file: %v", err)
	}

	c, err = HTTP{Username: "u", Password: "p"}.NewClient(2 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if v, err := get(t.Context(), c, server.URL+"/who"); err != nil || v["who"] != "Basic dTpw" {
		t.Errorf("user: %v, %v", v, err)
	}
}

// TestHTTPTLS shows that certificates on both sides may be replaced under a
// running client, and that one that does not fit is refused.
func TestHTTPTLS(t *testing.T) {
	dir := t.TempDir()
	files := TLS{CAFile: filepath.Join(dir, "ca"), CertFile: filepath.Join(dir, "cert"), KeyFile: filepath.Join(dir, "key"), ServerName: "registry.example.org"}
	replace := func(to, from string) {
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(to, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	client := testcert.New(t, "client.example.org")
	replace(files.CertFile, client.Cert)
	replace(files.KeyFile, client.Key)

	serve := func(of, theirs *testcert.Certificate) string {
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, `{"proto": %q}`, r.Proto)
		}))
		server.TLS = of.Server(theirs)
		server.EnableHTTP2 = true
		server.StartTLS()
		t.Cleanup(server.Close)
		return server.URL
	}
	first := testcert.New(t, "registry.example.org")
	replace(files.CAFile, first.Cert)
	c, err := HTTP{TLS: files}.NewClient(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if v, err := get(t.Context(), c, serve(first, client)); err != nil || v["proto"] != "HTTP/2.0" {
		t.Fatalf("%v, %v", v, err)
	}
	// Another authority and another client certificate.
	second, renewed := testcert.New(t, "registry.example.org"), testcert.New(t, "client.example.org")
	url := serve(second, renewed)
	if _, err := get(t.Context(), c, url); err == nil {
		t.Fatal("an unknown authority was trusted")
	}
	replace(files.CAFile, second.Cert)
	if _, err := get(t.Context(), c, url); err == nil {
		t.Fatal("an unknown client was let in: the test is wrong")
	}
	replace(files.CertFile, renewed.Cert)
	replace(files.KeyFile, renewed.Key)
	if _, err := get(t.Context(), c, url); err != nil {
		t.Fatal(err)
	}
	replace(files.CAFile, renewed.Key)
	other := serve(second, renewed)
	if _, err := get(t.Context(), c, other); err == nil || !strings.Contains(err.Error(), "tls.ca_file") {
		t.Errorf("with a broken file: %v", err)
	}
}

// TestServers shows fail-over: the server that answers is kept, one that fails
// is left for one that does not, and the error of all says what is wrong with
// each.
func TestServers(t *testing.T) {
	s := NewServers([]string{"a", "b", "c"})
	var tried []string
	down := map[string]error{}
	do := func() error {
		tried = nil
		return s.Do(t.Context(), func(_ context.Context, address string) error {
			tried = append(tried, address)
			return down[address]
		})
	}
	want := func(err error, text, order, detail string) {
		t.Helper()
		if got := fmt.Sprint(err); !strings.Contains(got, text) {
			t.Errorf("error %q, want %q", got, text)
		}
		if got := strings.Join(tried, " "); got != order {
			t.Errorf("tried %q, want %q", got, order)
		}
		if got := s.String(); !strings.HasPrefix(got, detail) {
			t.Errorf("detail %q, want %q", got, detail)
		}
	}
	want(do(), "nil", "a", "a")
	down["a"] = &StatusError{Status: 503}
	want(do(), "nil", "a b", "b, a answers status 503 since ")
	down["a"] = nil
	want(do(), "nil", "b", "b, a answers")
	down["b"] = errors.New("refused")
	want(do(), "nil", "b c", "c, a answers")
	down["a"], down["c"] = errors.New("broken"), errors.New("broken")
	want(do(), "a: broken; b: refused; c: broken", "c a b", "a cannot be used")
	down["b"] = nil
	want(do(), "nil", "c a b", "b, a cannot")
	if h := s.Health(); h[0].Err == nil || h[0].InUse || !h[1].InUse || h[1].Err != nil || h[2].Since.IsZero() {
		t.Errorf("health is %+v", h)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := s.Do(ctx, func(context.Context, string) error { cancel(); return errors.New("cut") })
	if !errors.Is(err, context.Canceled) || s.Health()[1].Err != nil {
		t.Errorf("a call that was given up counts: %v, %+v", err, s.Health())
	}
}
