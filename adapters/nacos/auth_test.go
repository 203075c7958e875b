package nacos

import (
	"context"
	"crypto/hmac"
	"crypto/sha1"
	"encoding/base64"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestSign shows what a cloud's server is sent, by both versions of its scheme.
func TestSign(t *testing.T) {
	now := time.UnixMilli(1700000000123)
	mac := func(key, data string) string {
		m := hmac.New(sha1.New, []byte(key))
		m.Write([]byte(data))
		return base64.StdEncoding.EncodeToString(m.Sum(nil))
	}
	const data = "1700000000123@@G@@web"
	h := map[string]string{}
	newAuth(Config{AccessKey: "ak", SecretKey: "sk", SecurityToken: "st"}, nil, nil).signTo(h, "G@@web", now)
	if diff := cmp.Diff(map[string]string{"ak": "ak", "data": data, "signature": mac("sk", data), "Spas-SecurityToken": "st"}, h); diff != "" {
		t.Errorf("version 1 (-want +got):\n%s", diff)
	}
	h = map[string]string{}
	newAuth(Config{AccessKey: "ak", SecretKey: "sk", Region: "cn-hangzhou"}, nil, nil).signTo(h, "", now)
	// The key as the SDK derives it for 2023-11-14 in cn-hangzhou.
	key := signingKey("sk", "20231114", "cn-hangzhou")
	if diff := cmp.Diff(map[string]string{"ak": "ak", "data": "1700000000123", "signature": mac(key, "1700000000123"), "signatureVersion": "v4"}, h); diff != "" {
		t.Errorf("version 4 (-want +got):\n%s", diff)
	}
}

// TestLogin shows which paths are asked, what is an error, and that a token is renewed once it was refused.
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
	a := newAuth(Config{Username: "u", Password: "p"}, s.Client(), slog.New(slog.DiscardHandler))
	codes["/nacos/v3/auth/user/login"] = http.StatusNotFound
	for _, bad := range []struct {
		code       int
		body, want string
	}{
		{http.StatusForbidden, "unknown user!", `user "u": status 403 "unknown user!"`},
		{http.StatusOK, "<html>", "no JSON"},
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
	if a.renew(t.Context(), target, "t1") {
		t.Error("a token was renewed that is a moment old")
	}
	a.tokenTime = time.Now().Add(-time.Minute)
	answers["/nacos/v1/auth/users/login"] = `{"accessToken":"t2","tokenTtl":18000}`
	if !a.renew(t.Context(), target, "t1") {
		t.Error("a token that was refused was not renewed")
	}
	if h, err := a.headers(t.Context(), ""); err != nil || h[headerToken] != "t2" {
		t.Errorf("headers %v, error %v", h, err)
	}
}
