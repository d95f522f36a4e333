import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.Base64;

/** Look-ups with Java's HttpClient as it comes: java LookUps URL < requests > answers. */
public class LookUps {
    public static void main(String[] arguments) throws IOException, InterruptedException {
        HttpClient client = HttpClient.newHttpClient();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] fields = line.split("\t");
            String[] keys = fields[1].split(" ");
            int count = keys.length;
            String id = fields[0].equals("-") ? "" : "\"id\": \"" + fields[0] + "\", ";
            byte[] document = ("{" + id + "\"inputs\": [{\"name\": \"item_id\", \"datatype\": \"INT64\", \"shape\": [" + count
                    + "], \"parameters\": {\"binary_data_size\": " + 8 * count + "}}], \"outputs\": "
                    + "[{\"name\": \"item_id\", \"parameters\": {\"binary_data\": true}}, "
                    + "{\"name\": \"item_id.found\", \"parameters\": {\"binary_data\": true}}]}").getBytes(StandardCharsets.UTF_8);
            ByteBuffer body = ByteBuffer.allocate(document.length + 8 * count).order(ByteOrder.LITTLE_ENDIAN).put(document);
            for (String key : keys) {
                body.putLong(Long.parseLong(key));
            }
            HttpRequest post = HttpRequest.newBuilder(URI.create(arguments[0]))
                    .header("Content-Type", "application/octet-stream")
                    .header("Inference-Header-Content-Length", String.valueOf(document.length))
                    .POST(HttpRequest.BodyPublishers.ofByteArray(body.array()))
                    .build();
            HttpResponse<byte[]> answer = client.send(post, HttpResponse.BodyHandlers.ofByteArray());
            if (answer.statusCode() != 200) {
                throw new IOException(answer.statusCode() + ": " + new String(answer.body(), StandardCharsets.UTF_8));
            }
            System.out.println(answer.headers().firstValue("Inference-Header-Content-Length").orElse("0") + " "
                    + Base64.getEncoder().encodeToString(answer.body()));
        }
    }
}
