package nacos

import (
	"context"
	"crypto/hmac"
	"crypto/sha1" // what the cloud's scheme uses
	"encoding/base64"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	grpcapi "github.com/nacos-group/nacos-sdk-go/v2/api/grpc"
	"google.golang.org/protobuf/types/known/anypb"
)

// TestSign shows what a cloud's server is sent, by both versions of its scheme.
// What is wanted was written by the SDK's own code:
// NamingResourceInjector.doInject of v2.3.5 for what
// BuildNamingResourceByRequest says of each request, copied into a program of
// its own, with the clock set to this time.
func TestSign(t *testing.T) {
	now := time.UnixMilli(1700000000123)
	keys := Config{AccessKey: "ak", SecretKey: "sk"}
	temporary, regional := keys, keys
	temporary.SecurityToken = "st"
	regional.Region = "cn-hangzhou"
	for _, test := range []struct {
		what, group, name string
		config            Config
		want              map[string]string
	}{
		{"a service", "G", "web", keys, map[string]string{"ak": "ak", "data": "1700000000123@@G@@web", "signature": "qOyO8qyquzhqLSHljWX8UM/+GBI="}},
		{"a list", "G", "", keys, map[string]string{"ak": "ak", "data": "1700000000123@@G@@", "signature": "QA/n6K2GGHRoa2zpOAgm66iq/LA="}},
		{"a name with @@", "G", "a@@b", keys, map[string]string{"ak": "ak", "data": "1700000000123@@a@@b", "signature": "JNY8CijLa5quu7WgJMixngUvNAA="}},
		{"anything else", "", "", keys, map[string]string{"ak": "ak", "data": "1700000000123", "signature": "Eum4BXZBhgaYXJPL3bBiBkFTmu0="}},
		{
			"a service, temporary key", "G", "web", temporary,
			map[string]string{"ak": "ak", "data": "1700000000123@@G@@web", "signature": "qOyO8qyquzhqLSHljWX8UM/+GBI=", "Spas-SecurityToken": "st"},
		},
		{
			"a service, v4", "G", "web", regional,
			map[string]string{"ak": "ak", "data": "1700000000123@@G@@web", "signature": "2SIgmfJMbUdNBo8Q+OtLwyd2kYg=", "signatureVersion": "v4"},
		},
		{
			"a list, v4", "G", "", regional,
			map[string]string{"ak": "ak", "data": "1700000000123@@G@@", "signature": "xx4ApUErkTY6z9hJvqTJxt8l9vw=", "signatureVersion": "v4"},
		},
		{
			"anything else, v4", "", "", regional,
			map[string]string{"ak": "ak", "data": "1700000000123", "signature": "crw1eeLlgdgMkq2MwyvnSGXV6wQ=", "signatureVersion": "v4"},
		},
	} {
		h := map[string]string{}
		if err := newAuth(test.config, nil, nil).signTo(h, resource(test.group, test.name), now); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(test.want, h); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.what, diff)
		}
	}
}

// TestSigned shows for which resource each request is signed.
func TestSigned(t *testing.T) {
	answers := &canned{answer: &grpcapi.Payload{Metadata: &grpcapi.Metadata{}, Body: &anypb.Any{Value: []byte(`{"resultCode":200,"count":0,"serviceInfo":{"hosts":[]}}`)}}}
	c := &conn{client: answers, sign: newAuth(Config{AccessKey: "ak", SecretKey: "sk"}, nil, nil)}
	ctx := t.Context()
	for _, ask := range []func() error{
		func() error { _, err := c.subscribe(ctx, "public", "G", "web"); return err },
		func() error { _, err := c.query(ctx, "public", "G", "a@@b"); return err },
		func() error { return c.unsubscribe(ctx, "public", "G", "web") },
		func() error { _, _, err := c.listPage(ctx, "public", "G", 1, 10); return err },
		func() error { return c.fuzzyWatch(ctx, "public", "public>>*>>*", nil, true) },
		func() error { return c.health(ctx) },
	} {
		if err := ask(); err != nil {
			t.Error(err)
		}
	}
	var got []string
	for _, p := range answers.asked {
		_, data, _ := strings.Cut(p.GetMetadata().GetHeaders()["data"], "@@")
		got = append(got, p.GetMetadata().GetType()+" "+data)
	}
	want := []string{
		"SubscribeServiceRequest G@@web", "ServiceQueryRequest a@@b", "SubscribeServiceRequest G@@web", "ServiceListRequest G@@", "NamingFuzzyWatchRequest ", "HealthCheckRequest ",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("signed (-want +got):\n%s", diff)
	}
}

// TestLogin shows which paths are asked, what is an error, and that a token is
// renewed once it was refused.
func TestLogin(t *testing.T) {
	answers := map[string]string{}
	codes := map[string]int{}
	var asked []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.Path+" "+r.FormValue("username")+" "+r.FormValue("password"))
		if code := codes[r.URL.Path]; code != 0 {
			w.WriteHeader(code)
		}
		_, _ = w.Write([]byte(answers[r.URL.Path]))
	}))
	defer s.Close()
	target, err := parseServer(s.URL, "/nacos", 1000)
	if err != nil {
		t.Fatal(err)
	}
	a := newAuth(Config{Username: "u", Password: "p"}, testClient(t), slog.New(slog.DiscardHandler))
	codes["/nacos/v3/auth/user/login"] = http.StatusNotFound
	for _, bad := range []struct {
		code       int
		body, want string
	}{
		{http.StatusForbidden, "unknown user!", `user "u": status 403 "unknown user!"`},
		{http.StatusOK, "<html>", "not JSON"},
		{http.StatusOK, "{}", "no accessToken"},
		{http.StatusNotFound, "", "context path"},
	} {
		codes["/nacos/v1/auth/users/login"], answers["/nacos/v1/auth/users/login"] = bad.code, bad.body
		if err := a.ensure(t.Context(), target); err == nil || !strings.Contains(err.Error(), bad.want) {
			t.Errorf("%d %s: error %v, want %q", bad.code, bad.body, err, bad.want)
		}
	}
	asked = nil
	codes["/nacos/v1/auth/users/login"], answers["/nacos/v1/auth/users/login"] = http.StatusOK, `{"accessToken":"t1","tokenTtl":18000}`
	for range 2 {
		if err := a.ensure(context.Background(), target); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{"/nacos/v3/auth/user/login u p", "/nacos/v1/auth/users/login u p"}, asked); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
	if a.life() != 18000*6*time.Second/10 {
		t.Errorf("the token is used for %v", a.life())
	}
	if a.renew(t.Context(), target, 1) {
		t.Error("a token was renewed that is a moment old")
	}
	a.tokenTime = time.Now().Add(-time.Minute)
	answers["/nacos/v1/auth/users/login"] = `{"accessToken":"t2","tokenTtl":18000}`
	if !a.renew(t.Context(), target, 1) {
		t.Error("a token that was refused was not renewed")
	}
	if h, _, err := a.headers(""); err != nil || h[headerToken] != "t2" {
		t.Errorf("headers %v, error %v", h, err)
	}
}

// TestCredentialsOfFiles shows that keys and tokens in files may be replaced
// while a server is followed: a changed file is read before the next request,
// and every file, changed by its time or not, after a refusal.
func TestCredentialsOfFiles(t *testing.T) {
	dir := t.TempDir()
	stamp := time.Now().Add(-time.Hour)
	write := func(name, content string, at time.Time) string {
		t.Helper()
		file := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(file, []byte(content+"\n"), 0o600), os.Chtimes(file, at, at)); err != nil {
			t.Fatal(err)
		}
		return file
	}
	for what, config := range map[string]Config{
		"keys": {
			AccessKeyFile: write("ak", "1", stamp), SecretKeyFile: write("sk", "1", stamp), SecurityTokenFile: write("st", "1", stamp),
		},
		"token": {TokenFile: write("token", "1", stamp)},
	} {
		t.Run(what, func(t *testing.T) {
			accepted, asked := "1", 0
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				asked++
				q := r.URL.Query()
				good := r.Header.Get(headerToken) == accepted
				if what == "keys" {
					mac := hmac.New(sha1.New, []byte(accepted))
					mac.Write([]byte(q.Get(headerData)))
					good = q.Get(headerAccessKey) == accepted && q.Get(headerSecurityToken) == accepted && q.Get(headerSignature) == base64.StdEncoding.EncodeToString(mac.Sum(nil))
				}
				if !good {
					w.WriteHeader(http.StatusForbidden)
				}
				_, _ = w.Write([]byte("{}"))
			}))
			defer s.Close()
			target, err := parseServer(s.URL, "/nacos", 1000)
			if err != nil {
				t.Fatal(err)
			}
			h := &httpAPI{server: target, client: testClient(t), auth: newAuth(config, nil, nil)}
			get := func(when string, want int, works bool) {
				t.Helper()
				asked = 0
				if err := h.get(t.Context(), "/", "", nil, &struct{}{}); (err == nil) != works || asked != want {
					t.Errorf("%s: asked %d times, want %d, and error %v", when, asked, want, err)
				}
			}
			all := func(content string, at time.Time) {
				for _, name := range []string{"ak", "sk", "st", "token"} {
					write(name, content, at)
				}
			}
			all("1", stamp)
			get("the first", 1, true)
			accepted = "2"
			get("refused, and nothing else is there", 1, false)
			all("2", stamp.Add(time.Second))
			get("the files changed", 1, true)
			accepted = "3"
			all("3", stamp.Add(time.Second))
			get("they changed, and do not look so", 2, true)
			if what == "keys" {
				write("ak", "4", stamp.Add(2*time.Second))
				get("a part is replaced", 2, false)
				accepted = "4"
				all("4", stamp.Add(2*time.Second))
				get("all of it is", 1, true)
			}
		})
	}
}
